"""Reasons why a point cannot run on this machine, found before any run starts.

CUDA is not initialized, as a context here would take memory from the runs.
"""

import functools
import subprocess
from collections.abc import Iterator

from phalanx.configs.schema import Config
from phalanx.kernels.registry import KernelUnavailable, resolve
from phalanx.moe.report.console import quiet
from phalanx.moe.run.preflight import preflight
from phalanx.parallel.megatron.imports import importing_megatron


def unsupported(cfg: Config, ranks: int, device: str) -> str:
    """Why a valid configuration cannot run here, a line per reason; empty if no reason is known.

    `device` is `cpu`, or `cuda` or `auto` for this machine's GPUs.
    """
    errors = [*map(str, preflight(cfg).errors)]
    capability = None if device == "cpu" else gpu_capability()
    if device == "cpu" or capability is not None:
        errors += _kernels(cfg, ranks, "cpu" if device == "cpu" else "cuda", capability)
    return "\n".join(errors)


def _kernels(
    cfg: Config, ranks: int, device: str, capability: tuple[int, int] | None
) -> Iterator[str]:
    k = cfg.kernels
    named = {"grouped_mlp": k.backend, "attention": k.attention, "norm": k.norm}
    if set(named.values()) == {"auto"}:  # always resolves
        return
    quiet()
    with importing_megatron():
        from phalanx.moe.model.kernel_facts import facts
    known_facts = facts(cfg, ranks, device=device, capability=capability)
    for op, backend in named.items():
        try:
            resolve(op, backend, known_facts)
        except KernelUnavailable as error:
            yield str(error)


@functools.cache
def gpu_capability() -> tuple[int, int] | None:
    """CUDA capability of the first GPU; None if nvidia-smi reports none."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        completed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        major, minor = completed.stdout.splitlines()[0].split(".")
        return int(major), int(minor)
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None
