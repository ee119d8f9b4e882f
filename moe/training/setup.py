"""From a validated config to a job ready to train: groups, kernels, model, engine.

The order matters: weights are initialized before the data parallel wrapper copies them into its
buffers, and the wrapper exists before the optimizer makes its master copies.
"""

from dataclasses import dataclass, replace

from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from phalanx.configs import capture
from phalanx.configs.arithmetic.batch_sizes import in_steps
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import is_fp8, quantizes_on_arrival, rows_in_fp8
from phalanx.configs.layout import document_places, logit_interval
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import ATTENTION_BACKENDS, EXPERT_BACKENDS
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import expert_parallel_size
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec
from phalanx.kernels.registry import Choice
from phalanx.kernels.wgrad_queue import Waiting
from phalanx.moe.estimate.gains.delayed_wgrad import beside_exchanges, waits
from phalanx.moe.estimate.gains.fp8_gain import fp8_gain
from phalanx.moe.estimate.gains.wgrad_pairs import pairs
from phalanx.moe.estimate.memory import stage_memory
from phalanx.moe.experts import activation_of
from phalanx.moe.layer import MoEOptions
from phalanx.moe.model.gpt import Backends, build, embedding_stages
from phalanx.moe.model.init import initialize
from phalanx.moe.model.max_logits import MaxLogits
from phalanx.moe.model.megatron_config import Layout, transformer_config
from phalanx.moe.model.qk_clip import QKClip
from phalanx.moe.training.choices import (
    agreed_experts,
    choose_copy_costs,
    choose_delayed_wgrad,
    choose_fp8_weights,
    choose_graph,
    choose_kernels,
    choose_overlap,
    emulated_layers,
    emulation,
    with_choices,
)
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.replication.choice import replication_choices, with_replication
from phalanx.parallel.dispatcher.transport import choices as transport_choices
from phalanx.parallel.dispatcher.transport import (
    choose_transport,
    exchange_options,
    for_two_passes,
    of_megatron,
)
from phalanx.parallel.dispatcher.transport_class import Transport
from phalanx.parallel.engine import Engine
from phalanx.parallel.fault.agreement import gather
from phalanx.parallel.groups import Groups, create
from phalanx.parallel.megatron import patches
from phalanx.parallel.runtime import Runtime


@dataclass(frozen=True)
class Job:
    """Objects that the training loop uses."""

    cfg: Config
    runtime: Runtime
    groups: Groups
    choices: list[Choice]
    """Kernels, transport, overlap and graph, with their reasons."""
    captured: bool
    """Steps are captured in a CUDA graph and replayed (`run.graph`)."""
    budget: Budget
    engine: Engine
    places: int = 0
    """Most documents of a sequence, if core attention needs their bounds; else 0."""
    max_logits: MaxLogits | None = None
    """Largest logits of attention, if the run measures them."""

    @property
    def data_parallel(self) -> int:
        """Number of replicas that read different samples."""
        return self.groups.data


@dataclass(frozen=True)
class BuiltModel:
    """Model of this rank before its weights are initialized or loaded, with its choices."""

    config: TransformerConfig
    groups: Groups
    choices: list[Choice]
    captured: bool
    budget: Budget
    chunks: list[GPTModel]
    places: int
    """See `Job.places`."""
    overlaps: bool
    """Forward passes run beside backward passes (`parallel.overlap_microbatches`)."""
    wgrads: Waiting
    """Events for which weight gradients wait."""


def setup(cfg: Config, runtime: Runtime, choices: list[Choice] | None = None) -> Job:
    """Build the job on this rank. `choices` are those of `choose_kernels`. Collective."""
    built = build_model(cfg, runtime, choices)
    groups = built.groups
    initialize(
        built.chunks,
        seed=cfg.run.seed,
        std=cfg.model.init_std,
        layers=cfg.model.layers,
        dp_cp_group=groups.pg.dp_cp,
    )
    engine = Engine(
        built.config,
        built.chunks,
        parallel=cfg.parallel,
        optim=in_steps(cfg.optim, cfg.data),
        steps=cfg.run.steps,
        device=runtime.device,
        overlap_microbatches=built.overlaps,
        wgrads=built.wgrads,
    )
    tops = _measure_logits(cfg, built, engine, runtime) if logit_interval(cfg.optim) else None
    return Job(
        cfg,
        runtime,
        groups,
        built.choices,
        built.captured,
        built.budget,
        engine,
        built.places,
        tops,
    )


def _measure_logits(cfg: Config, built: BuiltModel, engine: Engine, runtime: Runtime) -> MaxLogits:
    """Let attention record its largest logits, and with `optim.qk_clip` rescale updates by them."""
    model = engine.modules, built.config, built.groups.pg
    tops = MaxLogits(*model, runtime.device)
    if cfg.optim.qk_clip:
        clip = QKClip(*model, tops, cfg.optim.qk_clip)
        engine.rescale_after_updates(clip.parameters, clip.factors, lambda: tops.measured)
    return tops


def build_model(cfg: Config, runtime: Runtime, choices: list[Choice] | None = None) -> BuiltModel:
    """Build groups, kernels and model chunks without wrappers, on the device. Collective."""
    p = cfg.parallel
    choices = choices or choose_kernels(cfg, runtime)
    expert = expert_parallel_size(cfg, runtime.world)
    layout = Layout(p.tensor, p.context, p.pipeline, p.virtual_pipeline, expert)
    config = transformer_config(cfg, layout, on_cpu=runtime.device.type == "cpu")
    groups = create(
        tensor=p.tensor,
        context=p.context,
        pipeline=p.pipeline,
        virtual_pipeline=p.virtual_pipeline,
        expert=expert,
        embedding_stages=embedding_stages(cfg, config),
    )
    experts, attention, norm, *linear = (c.backend for c in choices)
    facts = EXPERT_BACKENDS[experts]
    if facts.stock_layer:
        transport = of_megatron(p.dispatch)
    else:
        transport = choose_transport(p.dispatch, groups.pg.ep, config.params_dtype)
        transport = with_replication(
            p.expert_replication,
            transport,
            ranks=expert if transport.nodes is None else transport.nodes.size,
            local=cfg.model.moe.experts // expert,
            costs=choose_copy_costs(cfg, runtime),
            keep=p.save_x == "keep",
        )
    resolved = with_choices(cfg, runtime, choices, transport.name)
    graph = choose_graph(resolved)
    resolved.run.graph = graph.backend
    resolved.precision.weights, weights = choose_fp8_weights(resolved, runtime)
    overlaps, overlap_line = choose_overlap(resolved, runtime)
    how = replace(resolved.parallel, overlap_microbatches="on" if overlaps else "off")
    overlapped = replace(resolved, parallel=how)
    delayed = choose_delayed_wgrad(overlapped, runtime)
    waiting = agreed_experts(experts)
    shared = cfg.model.moe.shared_ffn > 0
    quantizes = quantizes_on_arrival(resolved)
    overlap = overlap_line
    if has_experts(cfg.model):
        lines = transport_choices(
            transport,
            p,
            backend=waiting,
            shared=shared,
            quantizes=quantizes,
            two_passes=overlaps,
        )
        overlap = [*lines, *overlap_line]
    replicating = replication_choices(p.expert_replication, transport)
    gain = fp8_gain(resolved, runtime.world, MACHINES[resolved.run.machine])
    fp8 = [*weights, *([gain] if gain is not None else [])]
    choices = [*choices, *emulation(resolved), *fp8, *overlap, *replicating, *delayed, graph]
    captured = graph.backend == capture.CAPTURED
    budget = Budget(p.capacity_factor, device=runtime.device)
    backends = Backends(experts, attention, norm, *linear)
    exchange = exchange_options(p, transport, waiting, quantizes)
    if overlaps:
        transport, exchange = for_two_passes(transport, exchange, p.comm_sms, groups.pg.ep)
    options = _moe_options(cfg, experts, transport, budget, exchange, runtime.connections)
    # Gradients are summed over ranks, which must have the same order of channels.
    everywhere = all(EXPERT_BACKENDS[name].interleave for name in gather(experts))
    interleaved = options.spec.activation.gated and everywhere
    margins = options.spec.margins.at_least(exchange.comm_sms if overlaps else 0)
    spec = replace(options.spec, interleaved=interleaved, margins=margins)
    options = replace(options, spec=spec)
    built = replace(cfg, precision=resolved.precision)
    chunks = _chunks(built, config, groups, backends, options)
    for chunk in chunks:
        chunk.to(runtime.device)  # before initialization: random numbers depend on the device
    if facts.dense_multiple and is_fp8(cfg):
        choices = [*choices, *emulated_layers(chunks, experts)]
    places = 0
    if cfg.data.document_mask:
        patches.shift_within_documents()
        places = document_places(cfg.data) if ATTENTION_BACKENDS[attention].document_bounds else 0
    hides = beside_exchanges(overlapped)
    if not hides:
        overlapped.parallel.delay_wgrad = delayed[0].backend if delayed else "off"
    held = None
    if waits(overlapped):
        held = stage_memory(overlapped, runtime.world)[groups.pg.pp.rank()].held
    wgrads = Waiting(held, hides, pairs(overlapped, runtime.world))
    return BuiltModel(config, groups, choices, captured, budget, chunks, places, overlaps, wgrads)


def _moe_options(
    cfg: Config,
    backend: str,
    transport: Transport,
    budget: Budget,
    exchange: SymmOptions,
    connections: Connections,
) -> MoEOptions:
    e, margin = cfg.model.moe, cfg.kernels.sm_margin
    spec = MLPSpec(
        activation_of(e),
        backend,
        Margins(margin.forward, margin.dgrad, margin.wgrad),
        accumulate=cfg.kernels.gradient_accumulation_fusion,
    )
    return MoEOptions(
        moe=e,
        spec=spec,
        fp8_rows=rows_in_fp8(cfg),
        transport=transport,
        budget=budget,
        symm=exchange,
        connections=connections,
    )


def _chunks(
    cfg: Config, config: TransformerConfig, groups: Groups, backends: Backends, options: MoEOptions
) -> list[GPTModel]:
    chunks = []
    stages = range(groups.virtual_pipeline) if groups.virtual_pipeline > 1 else [None]
    for stage in stages:
        chunks.append(
            build(
                cfg,
                config,
                pg=groups.pg,
                backends=backends,
                moe=options,
                pre_process=ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
            )
        )
    return chunks
