"""Knobs that are off by default because they cost accuracy or memory.

Everything that costs neither is on by default or with `auto`.
"""

from collections.abc import Iterator
from typing import Any

from phalanx.configs.formats import is_fp8
from phalanx.configs.knobs import changed, overrides
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.plan.described import resolved
from phalanx.moe.plan.page.advice import needed

_ROOMY = 2.0  # capacity factor of the records with natural routing


def opt_ins(
    cfg: Config, world: int, machine: Machine, available: int
) -> Iterator[tuple[str, int, str]]:
    """(override, change of a rank's bytes, effect) of overrides that are valid and fit.

    Args:
        cfg: valid, as set by the user.
        world: ranks.
        machine: decides the values of `auto`.
        available: bytes that a rank may need.
    """
    before = needed(resolved(cfg, world, machine.node_gpus), world)
    for path, value, effect in _candidates(cfg):
        trial = changed(cfg, {path: value})
        try:
            validate(trial, world)
            size = needed(resolved(trial, world, machine.node_gpus), world)
        except ConfigError:
            continue
        if size != before and size <= available:
            yield overrides({path: value}), size - before, effect


def _candidates(cfg: Config) -> Iterator[tuple[str, Any, str]]:
    if cfg.optim.moments == "fp32":
        yield "optim.moments", "bf16", "rounds the moments of the optimizer"
    if cfg.parallel.grad_dtype == "fp32":
        yield "parallel.grad_dtype", "bf16", "rounds sums of gradients, and halves their traffic"
    if cfg.parallel.capacity_factor < _ROOMY:
        yield "parallel.capacity_factor", _ROOMY, "fewer steps rerun under uneven routing"
    if is_fp8(cfg) and cfg.precision.hidden == "bf16":
        yield "precision.hidden", "fp8", "rounds the inputs of activation gradients"
    yield "data.micro_batch", 2 * cfg.data.micro_batch, "fewer and larger kernels"
