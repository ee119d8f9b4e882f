"""What runs here, and why: kernels, what waits for tokens, and whether steps are captured.

Kernels are one rank's choice, the rest is agreed on: all ranks of the job ask together.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from phalanx.configs import capture
from phalanx.configs.formats import EMULATES, MICROSCALING, MULTIPLIES_FP8, is_fp8, width
from phalanx.configs.linear_attention import linear_layers
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError
from phalanx.kernels.expert_mlp.mlp_spec import FUSED_MULTIPLE
from phalanx.kernels.registry import Choice, Facts, resolve
from phalanx.moe.estimate.accounting import mlp_weights
from phalanx.moe.estimate.memory import needed
from phalanx.moe.estimate.room import device_room
from phalanx.moe.model.dense_mlp import DenseMLP
from phalanx.moe.model.kernel_facts import facts
from phalanx.moe.report.units import storage
from phalanx.moe.router.fused_topk import refuse
from phalanx.moe.shared_experts import SharedExperts
from phalanx.parallel.cuda_graph import WARM_STEPS
from phalanx.parallel.dispatcher.replication.options import CopyCosts, copy_costs, rates_on
from phalanx.parallel.dispatcher.transport_class import waits_for_tokens
from phalanx.parallel.fault.agreement import gather
from phalanx.parallel.megatron.recipe_linear import computes_by
from phalanx.parallel.runtime import Runtime


def choose_kernels(cfg: Config, runtime: Runtime) -> list[Choice]:
    """Resolve every op of the config on this machine.

    Raises:
        KernelUnavailable: a forced choice cannot run here.
    """
    cuda = runtime.device.type == "cuda"
    known = facts(
        cfg,
        runtime.world,
        device=runtime.device.type,
        capability=torch.cuda.get_device_capability(runtime.device) if cuda else None,
    )
    experts, e = resolve("grouped_mlp", cfg.kernels.backend, known), cfg.model.moe
    why = refuse(e.router, experts=e.experts, top_k=e.top_k)
    if experts.backend == "fused" and why is not None:
        experts = replace(experts, reason=f"{experts.reason}; routing by torch: {why}")
    return [
        experts,
        resolve("attention", cfg.kernels.attention, known),
        resolve("norm", cfg.kernels.norm, known),
        *_linear_attention(cfg, known),
    ]


def _linear_attention(cfg: Config, known: Facts) -> list[Choice]:
    """Of models that have it."""
    if not linear_layers(cfg.model):
        return []
    if cfg.kernels.attention == "reference":
        return [Choice("linear_attention", "torch", "kernels.attention=reference")]
    return [resolve("linear_attention", "auto", known)]


def known(cfg: Config, runtime: Runtime, choices: list[Choice], dispatch: str) -> Config:
    """A copy that names this rank's device, kernels and transport, as rules and estimates take it.

    Args:
        cfg: as given.
        runtime: this rank.
        choices: of `choose_kernels`.
        dispatch: the transport, or what is asked for where none is chosen yet.
    """
    cfg = copy.deepcopy(cfg)
    k = cfg.kernels
    k.backend, k.attention, k.norm = (choice.backend for choice in choices[:3])
    cfg.run.device, cfg.parallel.dispatch = runtime.device.type, dispatch
    return cfg


def choose_graph(cfg: Config) -> Choice:
    """What `run.graph` comes to on all ranks: what one cannot capture, none does. Collective.

    Args:
        cfg: of `known`, with the transport that was chosen.

    Raises:
        ConfigError: on all ranks, if `full_iteration` is forced and one of them cannot capture.
    """
    wanted, reasons = cfg.run.graph, gather(capture.not_capturable(cfg))
    asked = "auto" if wanted == "auto" else f"run.graph={wanted}"
    if wanted == capture.EAGER:
        return Choice("graph", wanted, asked)
    refusing = [rank for rank, reason in enumerate(reasons) if reason]
    if not refusing:
        when = f"captured after {WARM_STEPS} eager steps, which takes seconds"
        return Choice("graph", capture.CAPTURED, f"{asked}; {when}")
    reason = str(reasons[refusing[0]])
    if len(set(reasons)) > 1:
        reason += f" (rank {refusing[0]})"
    if wanted == capture.CAPTURED:
        raise ConfigError(capture.forced_graph_error(reason))
    return Choice("graph", capture.EAGER, f"{asked}; not {capture.CAPTURED}: {reason}")


def emulation(cfg: Config) -> list[Choice]:
    """What the start page says of a recipe that the experts' kernels do not multiply.

    Args:
        cfg: of `known`.
    """
    recipe, backend = cfg.precision.recipe, cfg.kernels.backend
    if backend == "cudnn" and recipe in MICROSCALING and cfg.precision.dense == "fp8":
        reason = "routed experts multiply it; other layers its values in bf16, which is slower; "
        return [Choice(recipe, "emulated", f"{reason}precision.dense=bf16 spares that")]
    if recipe not in MICROSCALING or backend not in EMULATES:
        return []
    return [Choice(recipe, "emulated", f"{backend} multiplies its values in bf16, which is slower")]


def emulated_layers(chunks: Sequence[nn.Module]) -> list[Choice]:
    """What the start page says of dense layers whose widths the fused kernels do not take.

    Args:
        chunks: of this rank, built for the fused kernels and a recipe.
    """
    found: dict[str, list[int]] = {}
    for chunk in chunks:
        for path, module in chunk.named_modules():
            spec, name = computes_by(module), path.rpartition(".")[2]
            if spec is not None and spec.backend != "fused":
                found[name] = list(module.weight.shape)
            if isinstance(module, (DenseMLP, SharedExperts)) and module.spec.backend != "fused":
                found[name] = [module.linear_fc2.weight.shape[1]]
    if not found:
        return []
    widths = ", ".join(f"{name} ({' x '.join(map(str, n))})" for name, n in sorted(found.items()))
    reason = f"{widths}: the fused kernels take multiples of {FUSED_MULTIPLE}"
    return [Choice("dense layers", "torch", f"emulated, which is slower: {reason}")]


def choose_fp8_weights(cfg: Config, runtime: Runtime) -> list[Choice]:
    """Where FP8 copies of expert weights live, on all ranks; nothing of runs without. Collective.

    Args:
        cfg: of `known`, with the transport and the graph that were chosen.
        runtime: this rank, which holds no part of the model yet.
    """
    if not is_fp8(cfg):
        return []
    backend, wanted = cfg.kernels.backend, cfg.precision.weights
    taken, why = _own_fp8_weights(cfg, runtime)
    if "scratch" in gather(taken) and taken == "resident":
        taken, why = "scratch", f"{why}, and another rank has less room"
    if wanted == "auto":
        return [Choice("fp8 weights", taken, f"auto; {why}")]
    if backend in MULTIPLIES_FP8:
        return [Choice("fp8 weights", wanted, f"precision.weights={wanted}")]
    return [Choice("fp8 weights", taken, f"{why}; precision.weights={wanted} is not in effect")]


def _own_fp8_weights(cfg: Config, runtime: Runtime) -> tuple[str, str]:
    """What `precision.weights=auto` comes to on this rank, and why."""
    backend = cfg.kernels.backend
    if backend not in MULTIPLIES_FP8:
        return "none", f"{backend} experts multiply values of FP8 in bf16"
    if backend == "megatron":
        return "resident", "Transformer Engine keeps its own; dense linear layers are bf16"
    kept = replace(cfg, precision=replace(cfg.precision, weights="resident"))
    need, room = needed(kept, runtime.world), device_room(runtime.device).free
    taken = "resident" if need <= room else "scratch"
    return taken, f"with resident ones {storage(need)} of {storage(room)} would be needed"


def choose_copy_costs(cfg: Config, runtime: Runtime) -> CopyCosts:
    """What copies of experts cost, the same on all ranks. Collective.

    By measured rates (configs/machines.py).
    """
    rates, keep = rates_on(runtime.device, cfg.run.machine), cfg.parallel.save_x == "keep"
    weights = mlp_weights(cfg.model, cfg.model.moe.ffn)
    own = copy_costs(rates, weights=weights, width=width(cfg), keep=keep)
    return max(gather(own))


def experts_of_all(backend: str) -> str:
    """This rank's experts, or those of another rank if these cannot wait for tokens. Collective."""
    told = gather(backend)
    return next((name for name in told if not waits_for_tokens(name)), backend)
