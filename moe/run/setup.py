"""From a validated config to a job ready to train: groups, kernels, model, engine.

The order matters: weights are initialized before the data parallel wrapper copies them into its
buffers, and the wrapper exists before the optimizer makes its master copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from phalanx.configs.arithmetic.batch_sizes import in_steps
from phalanx.configs.arithmetic.layers import mixer_layers, of_variants
from phalanx.configs.formats import is_fp8, rows_in_fp8
from phalanx.configs.layout import expert_parallel_size, logit_interval
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.capabilities import OVERLAP
from phalanx.configs.tables.layers import MIXERS
from phalanx.configs.tables.machines import machine_named
from phalanx.configs.tables.optimizers import AFTER_UPDATES, HOST_STATES, MOMENTS
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, channel_order
from phalanx.kernels.registry import Choice
from phalanx.moe.job import Job
from phalanx.moe.layer import MoEOptions
from phalanx.moe.model.dense_mlp import DenseMLP
from phalanx.moe.model.gpt import Backends, build, embedding_stages
from phalanx.moe.model.init import initialize
from phalanx.moe.model.kernel_facts import activation_of
from phalanx.moe.model.max_logits import MaxLogits
from phalanx.moe.model.megatron_config import Layout, transformer_config
from phalanx.moe.plan.described import agreed_plan
from phalanx.moe.plan.plan import Plan
from phalanx.moe.plan.remedies import fp8_gain
from phalanx.moe.shared_experts import SharedExperts
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.collectives import IN_TURN, Passes
from phalanx.parallel.dispatcher.transport import connect, load_counts
from phalanx.parallel.engine import Engine
from phalanx.parallel.groups import Groups, create
from phalanx.parallel.megatron import patches
from phalanx.parallel.megatron.recipe_linear import computes_by
from phalanx.parallel.runtime import Runtime


@dataclass(frozen=True)
class BuiltModel:
    """Model of this rank before its weights are initialized or loaded."""

    config: TransformerConfig
    groups: Groups
    budget: Budget
    chunks: list[GPTModel]


def setup(cfg: Config, runtime: Runtime, plan: Plan | None = None) -> Job:
    """Build the job on this rank. Collective.

    Args:
        cfg: valid configuration, as the user set it.
        runtime: this rank.
        plan: plan of the run; by default the ranks make one.
    """
    plan = plan or agreed_plan(cfg, runtime)[0]
    lines, state_room = plan.lines(), 0
    if MOMENTS[cfg.optim.moments].hosted:
        state_room, lines = resolve_name(HOST_STATES).placement(plan, runtime.device)
    built = build_model(plan, runtime)
    groups = built.groups
    initialize(
        built.chunks,
        seed=cfg.run.seed,
        std=cfg.model.init_std,
        layers=cfg.model.layers,
        dp_cp_group=groups.pg.dp_cp,
    )
    changes, groups_of = of_variants(cfg.model), dict[Any, Any]()
    for change in (change for change in changes if change.begins):
        groups_of |= resolve_name(change.begins)(cfg, built.chunks)
    engine = Engine(
        built.config,
        built.chunks,
        overrides=groups_of,
        parallel=cfg.parallel,
        optim=in_steps(cfg.optim, cfg.data),
        steps=cfg.run.steps - cfg.run.schedule_begin,
        device=runtime.device,
        overlap_microbatches=plan.overlaps,
        wgrads=plan.waiting(groups.pg.pp.rank()),
        state_room=state_room,
    )
    parts = [*(MIXERS[name] for name in mixer_layers(cfg.model)), *changes]
    for part in (part for part in parts if part.trains):
        lines += resolve_name(part.trains)(cfg, engine) or []
    tops = _measure_logits(cfg, built, engine, runtime) if logit_interval(cfg.optim) else None
    lines += _estimates(cfg, plan, built)
    return Job(cfg, plan, runtime, groups, lines, built.budget, engine, tops)


def _estimates(cfg: Config, plan: Plan, built: BuiltModel) -> list[Choice]:
    """Lines of the start page on the estimated speed of FP8, and on layers that emulate it."""
    if not is_fp8(cfg):
        return []
    gain = fp8_gain(plan.cfg, plan.world, machine_named(plan.cfg.run.machine))
    emulated = emulated_layers(built.chunks, plan.cfg.kernels.backend)
    return [*([gain] if gain is not None else []), *emulated]


def _measure_logits(cfg: Config, built: BuiltModel, engine: Engine, runtime: Runtime) -> MaxLogits:
    """Let attention record its largest logits, and rescale parameters by them if asked for."""
    model = engine.modules, built.config, built.groups.pg
    tops = MaxLogits(*model, runtime.device)
    for knob, path in AFTER_UPDATES.items():
        if limit := getattr(cfg.optim, knob):
            clip = resolve_name(path)(*model, tops, limit)
            engine.rescale_after_updates(clip.parameters, clip.factors, lambda: tops.measured)
    return tops


def build_model(plan: Plan, runtime: Runtime) -> BuiltModel:
    """Build groups and model chunks without wrappers, on the device. Collective."""
    cfg, p = plan.cfg, plan.cfg.parallel
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
    budget = Budget(p.capacity_factor, device=runtime.device)
    chunks = _chunks(plan, config, groups, _moe_options(plan, groups, budget, runtime))
    for chunk in chunks:
        chunk.to(runtime.device)  # before initialization: random numbers depend on the device
    if cfg.data.document_mask:
        patches.shift_within_documents()
    return BuiltModel(config, groups, budget, chunks)


def _moe_options(plan: Plan, groups: Groups, budget: Budget, runtime: Runtime) -> MoEOptions:
    cfg = plan.cfg
    activation = activation_of(cfg.model.moe)
    spec = MLPSpec(
        activation,
        cfg.kernels.backend,
        plan.margins,
        accumulate=cfg.kernels.gradient_accumulation_fusion,
        channel_order=channel_order(cfg.kernels.backend, activation),
    )
    passes: Passes = resolve_name(OVERLAP.passes) if plan.overlaps else IN_TURN
    transport = connect(plan.transports, plan.nodes, groups.pg.ep, passes)
    return MoEOptions(
        moe=cfg.model.moe,
        spec=spec,
        fp8_rows=rows_in_fp8(cfg),
        transport=transport,
        load_counts=load_counts(plan.transports),
        budget=budget,
        symm=plan.exchange(runtime.rank),
        connections=runtime.connections,
    )


def _chunks(
    plan: Plan, config: TransformerConfig, groups: Groups, options: MoEOptions
) -> list[GPTModel]:
    k, chunks = plan.cfg.kernels, []
    backends = Backends(k.backend, k.attention, k.norm, *plan.other_mixer)
    stages = range(groups.virtual_pipeline) if groups.virtual_pipeline > 1 else [None]
    for stage in stages:
        chunks.append(
            build(
                plan.cfg,
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


def emulated_layers(chunks: Sequence[nn.Module], backend: str) -> list[Choice]:
    """Line of the start page on dense layers whose widths the fused kernels do not support."""
    multiple = expert_backend(backend).dense_multiple
    if not multiple:
        return []
    shapes: dict[str, list[int]] = {}
    for chunk in chunks:
        for path, module in chunk.named_modules():
            spec, name = computes_by(module), path.rpartition(".")[2]
            if spec is not None and not spec.facts.dense_multiple:
                shapes[name] = list(module.weight.shape)
            if not isinstance(module, (DenseMLP, SharedExperts)):
                continue
            if not module.spec.facts.dense_multiple:
                shapes[name] = [module.linear_fc2.weight.shape[1]]
    if not shapes:
        return []
    widths = ", ".join(f"{name} ({' x '.join(map(str, n))})" for name, n in sorted(shapes.items()))
    reason = f"{widths}: the {backend} kernels take multiples of "
    reason += str(multiple)
    return [Choice("dense layers", "torch", f"emulated, which is slower: {reason}")]
