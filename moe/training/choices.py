"""Choices of a run with their reasons: kernels, FP8 weights, graph capture, costs of copies.

Kernels are chosen by each rank; the other choices are agreed on by all ranks of the job.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from torch import nn

from phalanx.configs import capture
from phalanx.configs.arithmetic.accounting import mlp_weights
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import (
    is_emulated,
    is_fp8,
    multiplies_fp8,
    recipe_facts,
    resident_layers,
    width,
)
from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.linear_attention import linear_layers
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import EXPERT_BACKENDS, attention_backend, is_stock
from phalanx.configs.tables.machines import MACHINES, machine_of, with_margin
from phalanx.configs.validate import ConfigError
from phalanx.kernels.registry import Choice, Facts, resolve
from phalanx.moe.estimate.free_memory import free_gpu_memory
from phalanx.moe.estimate.gains.delayed_wgrad import ON, PAIRS, beside_exchanges
from phalanx.moe.estimate.gains.microbatch_overlap import microbatch_overlap
from phalanx.moe.estimate.gains.wgrad_pairs import possible
from phalanx.moe.estimate.memory import (
    USABLE,
    chooses_fp8_weights,
    fp8_place,
    fp8_weights,
    needed,
    with_delayed,
    with_fp8_weights,
    with_growth,
)
from phalanx.moe.model.dense_mlp import DenseMLP
from phalanx.moe.model.kernel_facts import facts
from phalanx.moe.model.precision import compute_dtype
from phalanx.moe.report.units import storage
from phalanx.moe.router.fused_topk import unsupported
from phalanx.moe.shared_experts import SharedExperts
from phalanx.parallel.cuda_graph import WARM_STEPS
from phalanx.parallel.dispatcher.replication.choice import with_replication
from phalanx.parallel.dispatcher.replication.options import CopyCosts, copy_costs, rates_on
from phalanx.parallel.dispatcher.transport import of_megatron, planned, refusals_here
from phalanx.parallel.dispatcher.transport_class import Transport, waits_for_tokens
from phalanx.parallel.fault.agreement import gather
from phalanx.parallel.megatron.recipe_linear import computes_by
from phalanx.parallel.runtime import Runtime, device_here


def choose_kernels(cfg: Config, runtime: Runtime) -> list[Choice]:
    """Resolve the backend of every op of the config on this machine.

    Raises:
        ConfigError: a GPU is asked for, and there is none.
        KernelUnavailable: a forced backend cannot run on this machine.
    """
    cuda = runtime.device.type == "cuda"
    if cfg.run.device == "cuda" and not cuda:
        raise ConfigError("run.device=cuda: torch sees no GPU here; set run.device=auto")
    machine_facts = facts(
        cfg,
        runtime.world,
        device=runtime.device.type,
        capability=torch.cuda.get_device_capability(runtime.device) if cuda else None,
    )
    experts, e = resolve("grouped_mlp", cfg.kernels.backend, machine_facts), cfg.model.moe
    reason = unsupported(e.router, experts=e.experts, top_k=e.top_k)
    if EXPERT_BACKENDS[experts.backend].fuses_router and reason is not None:
        experts = replace(experts, reason=f"{experts.reason}; routing by torch: {reason}")
    if e.experts and is_stock(experts.backend):
        by = "Transformer Engine's grouped GEMM" if HAVE_TE else "a loop over experts"
        experts = replace(experts, reason=f"{experts.reason}; {by}")
    return [
        experts,
        resolve("attention", cfg.kernels.attention, machine_facts),
        resolve("norm", cfg.kernels.norm, machine_facts),
        *_linear_attention(cfg, machine_facts),
    ]


def _linear_attention(cfg: Config, machine_facts: Facts) -> list[Choice]:
    """Choice for linear attention, if the model has any."""
    if not linear_layers(cfg.model):
        return []
    attention = cfg.kernels.attention
    forced = attention_backend(attention).linear
    if forced != "auto":
        return [Choice("linear_attention", forced, f"kernels.attention={attention}")]
    return [resolve("linear_attention", "auto", machine_facts)]


def with_choices(cfg: Config, runtime: Runtime, choices: list[Choice], dispatch: str) -> Config:
    """Copy of a config with this rank's device, kernels and transport in place of `auto`.

    `run.machine` becomes that of the rank's GPU, so that choices by rates and memory are those of a
    dry run for this GPU. It stays as set on a CPU, or on a GPU that configs/tables/machines.py
    lacks.

    Args:
        cfg: config of the run.
        runtime: this rank.
        choices: result of `choose_kernels`.
        dispatch: the transport, or the knob's value if none has been chosen yet.
    """
    cfg = copy.deepcopy(cfg)
    k = cfg.kernels
    k.backend, k.attention, k.norm = (choice.backend for choice in choices[:3])
    cfg.run.device, cfg.parallel.dispatch = runtime.device.type, dispatch
    if runtime.device.type == "cuda":
        gpu = torch.cuda.get_device_name(runtime.device)
        cfg.run.machine = machine_of(gpu, cfg.run.machine)
    return cfg


def choose_graph(cfg: Config) -> Choice:
    """Choice of graph capture on all ranks: none captures if one of them cannot. Collective.

    Args:
        cfg: result of `with_choices`, with the transport that was chosen.

    Raises:
        ConfigError: on all ranks, if `full_iteration` is forced and one of them cannot capture.
    """
    wanted, reasons = cfg.run.graph, gather(capture.not_capturable(cfg))
    setting = "auto" if wanted == "auto" else f"run.graph={wanted}"
    if wanted == capture.EAGER:
        return Choice("graph", wanted, setting)
    refusing = [rank for rank, reason in enumerate(reasons) if reason]
    if not refusing:
        when = f"captured after {WARM_STEPS} eager steps, which takes seconds"
        return Choice("graph", capture.CAPTURED, f"{setting}; {when}")
    reason = str(reasons[refusing[0]])
    if len(set(reasons)) > 1:
        reason += f" (rank {refusing[0]})"
    if wanted == capture.CAPTURED:
        raise ConfigError(capture.forced_graph_error(reason))
    return Choice("graph", capture.EAGER, f"{setting}; not {capture.CAPTURED}: {reason}")


def emulation(cfg: Config) -> list[Choice]:
    """Line of the start page on a recipe that the experts' kernels only emulate.

    Args:
        cfg: result of `with_choices`.
    """
    recipe, backend = cfg.precision.recipe, cfg.kernels.backend
    experts = EXPERT_BACKENDS[backend]
    if recipe in experts.multiplies and experts.dense and cfg.precision.dense == "fp8":
        reason = "routed experts multiply it; other layers its values in bf16, which is slower; "
        return [Choice(recipe, "emulated", f"{reason}precision.dense=bf16 avoids that")]
    if not (recipe_facts(cfg).microscaling and is_emulated(cfg)):
        return []
    return [Choice(recipe, "emulated", f"{backend} multiplies its values in bf16, which is slower")]


def emulated_layers(chunks: Sequence[nn.Module], backend: str) -> list[Choice]:
    """Line of the start page on dense layers whose widths the fused kernels do not support.

    Args:
        chunks: model chunks of this rank, built with a recipe.
        backend: their experts' backend, which runs dense layers of some widths.
    """
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
    reason += str(EXPERT_BACKENDS[backend].dense_multiple)
    return [Choice("dense layers", "torch", f"emulated, which is slower: {reason}")]


def choose_fp8_weights(cfg: Config, runtime: Runtime) -> tuple[int | str, list[Choice]]:
    """`precision.weights` of all ranks, and its line; no line without FP8 experts. Collective.

    Args:
        cfg: result of `with_choices`, with the transport and the graph that were chosen.
        runtime: this rank, before the model is built.
    """
    wanted, backend, world = cfg.precision.weights, cfg.kernels.backend, runtime.world
    if not is_fp8(cfg) or not has_experts(cfg.model):
        return wanted, []
    chooses = chooses_fp8_weights(cfg)
    free = free_gpu_memory(runtime.device).free if chooses else 0
    here = with_fp8_weights(cfg, fp8_weights(cfg, world, free))
    # All ranks take part: experts of some may be of a backend that has nothing to choose.
    agreed = with_fp8_weights(cfg, min(gather(resident_layers(here)[0])))
    if chooses:
        grown, room = with_growth(cfg, world), int(USABLE * free)
        need = needed(with_fp8_weights(grown, "resident"), world)
        reason = f"with resident weights {storage(need)} of {storage(room)} would be needed"
        if grown is not cfg:
            reason += f" at capacity_factor {grown.parallel.capacity_factor:g}"
        if resident_layers(agreed) != resident_layers(here):
            reason += ", and another rank has less free memory"
        line = Choice("fp8 weights", fp8_place(agreed), f"auto; {reason}")
        return agreed.precision.weights, [line]
    if not multiplies_fp8(cfg):
        place, reason = "none", f"{backend} experts multiply values of FP8 in bf16"
    elif is_stock(backend):
        place, reason = "resident", "Transformer Engine keeps its own; dense linear layers are bf16"
    else:
        return wanted, [Choice("fp8 weights", fp8_place(cfg), f"precision.weights={wanted}")]
    auto = wanted == "auto"
    reason = f"auto; {reason}" if auto else f"{reason}; precision.weights={wanted} is not in effect"
    return wanted, [Choice("fp8 weights", place, reason)]


def choose_overlap(cfg: Config, runtime: Runtime) -> tuple[bool, list[Choice]]:
    """True if micro-batches overlap on all ranks, and the line of the start page. Collective.

    There is no line where `auto` leaves it.

    Args:
        cfg: result of `with_choices`, with the transport, graph and FP8 weights that were chosen.
        runtime: this rank, before the model is built.

    Raises:
        ConfigError: overlap is forced and cannot run.
    """
    machine = MACHINES[cfg.run.machine]
    cuda = runtime.device.type == "cuda"
    available = with_margin(free_gpu_memory(runtime.device).free if cuda else machine.room)
    try:
        value, reason, error = *microbatch_overlap(cfg, runtime.world, machine, available), None
    except ConfigError as problem:  # perhaps of this rank's transport alone
        value, reason, error = "off", "", str(problem)
    values, errors = zip(*gather((value, error)), strict=True)
    if any(errors):
        raise ConfigError(next(filter(None, errors)))
    overlaps = "off" not in values
    if not overlaps and cfg.parallel.overlap_microbatches == "auto":
        return False, []
    return overlaps, [Choice("micro-batches", "overlap" if overlaps else "in turn", reason)]


_DELAYED = {
    ON: "while a stage would wait for transfers",
    PAIRS: "while a stage would wait for transfers, those of experts for two micro-batches at once",
}
"""When weight gradients are computed, by the value of `parallel.delay_wgrad`."""


def choose_delayed_wgrad(cfg: Config, runtime: Runtime) -> list[Choice]:
    """Choice of when weight gradients are computed, on all ranks; none if at once. Collective.

    Args:
        cfg: result of `with_choices`, with the transport, graph, FP8 weights and overlap of
            micro-batches that were chosen.
        runtime: this rank, before the model is built.
    """
    wanted, setting = cfg.parallel.delay_wgrad, f"parallel.delay_wgrad={cfg.parallel.delay_wgrad}"
    (*better, least), reason = possible(cfg, runtime.world, MACHINES[cfg.run.machine])
    everywhere = gather(better)  # ranks have GPUs and kernels of their own
    better = [value for value in better if all(value in others for others in everywhere)]
    if beside_exchanges(cfg) and least != PAIRS:
        why = f"; {setting}; {reason}" if wanted == PAIRS else ""
        return [Choice("wgrad", "overlap", f"exchanges of the backward pass{why}")]
    if cfg.parallel.pipeline == 1 and wanted != PAIRS:
        return []
    if not better:
        return [Choice("wgrad", least, f"{setting}; {reason}" if reason else setting)]
    if runtime.device.type == "cpu":
        return [Choice("wgrad", ON, f"auto; {_DELAYED[ON]}")]
    free, told = free_gpu_memory(runtime.device).free, ""
    for value in better:
        need = needed(with_delayed(cfg, value), runtime.world)
        fits = gather(need <= with_margin(free))
        told = f"with their operands {storage(need)} of {storage(free)} would be needed"
        if all(fits):
            return [Choice("wgrad", value, f"auto; {_DELAYED[value]}; {told}")]
    told += "" if need > with_margin(free) else ", and another rank has less free memory"
    return [Choice("wgrad", least, f"auto; {told}")]


def choose_copy_costs(cfg: Config, runtime: Runtime) -> CopyCosts:
    """Costs of copies of experts, by measured rates (configs/tables/machines.py).

    They are the same on all ranks. Collective.
    """
    rates, keep = rates_on(runtime.device, cfg.run.machine), cfg.parallel.save_x == "keep"
    weights = mlp_weights(cfg.model, cfg.model.moe.ffn)
    costs = copy_costs(rates, weights=weights, width=width(cfg), keep=keep)
    return max(gather(costs))


def agreed_experts(backend: str) -> str:
    """Backend of this rank's experts, or of a rank whose experts cannot wait for tokens.

    Collective.
    """
    return next((name for name in gather(backend) if not waits_for_tokens(name)), backend)


def rehearse(cfg: Config, world: int) -> None:
    """Make the choices of a start on this machine that it may refuse, in one process without ranks.

    The functions are those that a start calls; groups are predicted from identical ranks.

    Args:
        cfg: valid config.
        world: ranks of the run, of which as many are on a host as this one has GPUs, or all.

    Raises:
        ValueError: a choice cannot run here, as the start would say.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    runtime = Runtime(0, world, 0, device_here(local_ranks - 1))
    choices = choose_kernels(cfg, runtime)
    transport = _predicted_transport(cfg, runtime, choices[0].backend)
    resolved = with_choices(cfg, runtime, choices, transport.name)
    resolved.run.graph = choose_graph(resolved).backend
    resolved.precision.weights, _ = choose_fp8_weights(resolved, runtime)
    choose_overlap(resolved, runtime)


def _predicted_transport(cfg: Config, runtime: Runtime, experts: str) -> Transport:
    """Transport of a group of ranks like this process, with expert replication."""
    p, ranks = cfg.parallel, expert_parallel_size(cfg, runtime.world)
    if EXPERT_BACKENDS[experts].stock_layer:
        return of_megatron(p.dispatch)
    gpus = torch.cuda.device_count() if runtime.device.type == "cuda" else runtime.world
    refusals = refusals_here(p.dispatch, compute_dtype(cfg))
    chosen = planned(p.dispatch, ranks=ranks, node_ranks=gpus, refusals=refusals)
    return with_replication(
        p.expert_replication,
        chosen,
        ranks=ranks if chosen.inside is None else min(ranks, gpus),
        local=cfg.model.moe.experts // ranks,
        costs=CopyCosts(0, 0),
        keep=False,
    )
