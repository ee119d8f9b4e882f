"""What a run could have and does not unless it asks, since it costs accuracy or memory.

What costs neither is the default, or what `auto` takes.
"""

from collections.abc import Iterator
from typing import Any

from phalanx.configs.formats import is_fp8
from phalanx.configs.knobs import changed, overrides
from phalanx.configs.machines import Machine
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.estimate.advice import needed
from phalanx.moe.estimate.resolve import resolved

_ROOMY = 2.0
"""Capacity factor of the records with natural routing."""


def opt_ins(cfg: Config, world: int, machine: Machine, room: int) -> Iterator[tuple[str, int, str]]:
    """(override, bytes of a rank more or below 0 less, what it costs or gives for them).

    Those that are valid, fit, and change the memory of a rank.

    Args:
        cfg: valid, as given.
        world: ranks.
        machine: decides what `auto` takes.
        room: bytes that a rank may need.
    """
    before = needed(resolved(cfg, world, machine.node_gpus), world)
    for path, value, price in _candidates(cfg):
        trial = changed(cfg, {path: value})
        try:
            validate(trial, world)
            size = needed(resolved(trial, world, machine.node_gpus), world)
        except ConfigError:
            continue
        if size != before and size <= room:
            yield overrides({path: value}), size - before, price


def _candidates(cfg: Config) -> Iterator[tuple[str, Any, str]]:
    if cfg.optim.moments == "fp32":
        yield "optim.moments", "bf16", "rounds the moments of the optimizer"
    if cfg.parallel.grad_dtype == "fp32":
        yield "parallel.grad_dtype", "bf16", "rounds sums of gradients, which are half the bytes"
    if cfg.parallel.capacity_factor < _ROOMY:
        yield "parallel.capacity_factor", _ROOMY, "uneven routing has fewer steps run again"
    if is_fp8(cfg) and cfg.precision.hidden == "bf16":
        yield "precision.hidden", "fp8", "rounds what gradients of activations are computed from"
    yield "data.micro_batch", 2 * cfg.data.micro_batch, "fewer and larger kernels"
