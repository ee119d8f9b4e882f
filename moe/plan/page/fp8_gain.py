"""Speed of a run in FP8 against the same in bf16, by the estimate of step times.

FP8 does not pay for every model: small experts gain less in products than it costs to quantise
their rows, and tokens that travel in bf16 are quantised once all have arrived, so that their
exchange is exposed.
"""

from collections.abc import Mapping
from typing import Any

from phalanx.configs.formats import is_fp8, multiplies_fp8
from phalanx.configs.knobs import changed, overrides
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import ConfigError, validate
from phalanx.kernels.registry import Choice, KernelUnavailable
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved

_BF16: Mapping[str, Any] = {"precision.recipe": "bf16", "precision.dispatch": "auto"}
_NOTABLE = 1.01  # speeds that differ by less are not told apart


def fp8_gain(cfg: Config, world: int, machine: Machine) -> Choice | None:
    """Line on the speed of FP8, and on the override that is faster; None where none multiplies it.

    Args:
        cfg: valid, with `auto` or without.
        world: ranks.
        machine: rates, and values of `auto`.
    """
    if not is_fp8(cfg):
        return None
    fp8 = _resolved(cfg, world, machine)
    in_bf16 = _resolved(changed(cfg, _BF16), world, machine)
    if fp8 is None or in_bf16 is None or not multiplies_fp8(fp8):
        return None
    seconds, bf16_seconds = (step_time(c, world, machine).total for c in (fp8, in_bf16))
    others, rows = {"precision=bf16": bf16_seconds}, {"precision.dispatch": "fp8"}
    if (trial := _resolved(changed(cfg, rows), world, machine)) is not None:
        others[overrides(rows)] = step_time(trial, world, machine).total
    best = min(others, key=lambda name: others[name])
    reason = f"tokens/s of bf16, estimated for {machine.name}"
    if seconds > _NOTABLE * others[best]:
        reason += f"; {best} would be {seconds / others[best]:.2f} times as fast"
    return Choice("fp8 speed", f"{bf16_seconds / seconds:.2f} x", reason)


def _resolved(cfg: Config, world: int, machine: Machine) -> Config | None:
    """The config without `auto`; None if it is not valid or cannot run on the machine."""
    try:
        validate(cfg, world)
        return resolved(cfg, world, machine.node_gpus)
    except (ConfigError, KernelUnavailable):
        return None
