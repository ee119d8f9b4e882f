"""Check of the memory of hosts and GPUs, by all ranks before the model is built."""

import socket
import sys

from phalanx.configs.capture import resolved_graph
from phalanx.configs.knobs import overrides, shown
from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError
from phalanx.kernels.registry import Choice
from phalanx.moe.estimate.advice import needed
from phalanx.moe.estimate.free_memory import (
    FreeMemory,
    free_gpu_memory,
    free_host_memory,
    logits_bytes,
    memory_refusal,
    nearly_full,
    pinned_bytes,
)
from phalanx.moe.estimate.memory import fp8_weights, host_needed, with_fp8_weights
from phalanx.moe.model.precision import compute_dtype
from phalanx.moe.training.choices import with_choices
from phalanx.moe.training.out_of_memory import advice
from phalanx.parallel.dispatcher.transport import planned, refusals_here
from phalanx.parallel.fault.agreement import Failed, agree, gather
from phalanx.parallel.runtime import Runtime

_ON_CPU = 4
"""Copies of the logits, in units of their bytes, that the loss on a CPU needs: two in fp32."""


def check_memory(cfg: Config, runtime: Runtime, choices: list[Choice]) -> None:
    """Reject a run that surely does not fit, and warn on stderr of one that may not. Collective.

    Args:
        cfg: valid config.
        runtime: this rank, before the model is built.
        choices: kernels of experts, attention and norm.

    Raises:
        ConfigError: on all ranks, if the run does not fit on one.
    """
    hosts = gather(socket.gethostname())
    local_ranks = [rank for rank, name in enumerate(hosts) if name == hosts[runtime.rank]]
    host, on_gpu = free_host_memory(), runtime.device.type == "cuda"
    room, ranks = host, local_ranks
    if on_gpu:
        room, ranks = free_gpu_memory(runtime.device), [runtime.rank]
    try:
        agree(memory_refusal(cfg, runtime.world, ranks, room))
    except Failed as error:
        raise ConfigError(str(error)) from error
    transport = _transport(cfg, runtime.world, len(local_ranks))
    resolved = with_choices(cfg, runtime, choices, transport)
    resolved.run.graph = resolved_graph(resolved)
    # `auto` keeps FP8 copies in what is left.
    resolved.precision.weights = fp8_weights(resolved, runtime.world, free=0)
    expected = needed(resolved, runtime.world)
    expected = expected if on_gpu else len(ranks) * (expected + _ON_CPU * logits_bytes(cfg))
    remedies = advice(with_fp8_weights(cfg, resolved.precision.weights), runtime.world)
    warnings = [nearly_full(cfg.model.name, expected, room, remedies)]
    if on_gpu:
        warnings.append(_pinned(cfg, runtime.world, local_ranks, host))
        offloaded = len(local_ranks) * host_needed(resolved, runtime.world)
        knob = f"run.offload={shown(cfg.run.offload)}"
        warnings.append(nearly_full(knob, offloaded, host, f"set {overrides({'run.offload': []})}"))
    for texts in zip(*gather(warnings), strict=True):
        if runtime.is_main and any(texts):
            print(f"warning: {next(filter(None, texts))}", file=sys.stderr, flush=True)


def _pinned(cfg: Config, world: int, local_ranks: list[int], host: FreeMemory) -> str:
    """Warning about background checkpoints, which a rank on a GPU copies to its host."""
    if cfg.run.async_save == "off" or cfg.run.save_interval < 0:
        return ""
    size = pinned_bytes(cfg, world, local_ranks)
    return nearly_full("a background checkpoint", size, host, "set run.async_save=off")


def _transport(cfg: Config, world: int, near_ranks: int) -> str:
    """Transport that this rank expects, before the process groups that choose it exist."""
    if cfg.parallel.dispatch != "auto":
        return cfg.parallel.dispatch
    refusals, expert = refusals_here("auto", compute_dtype(cfg)), expert_parallel_size(cfg, world)
    return planned("auto", ranks=expert, node_ranks=near_ranks, refusals=refusals).name
