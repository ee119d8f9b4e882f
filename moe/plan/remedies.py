"""Overrides with which a run fits, for any function that says what one needs; the gain of FP8."""

from collections.abc import Callable, Mapping
from typing import Any

from phalanx.configs.formats import is_fp8, multiplies_fp8
from phalanx.configs.knobs import Changes, changed, overrides
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import ConfigError, validate
from phalanx.kernels.registry import Choice, KernelUnavailable
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved

_MOST_TOGETHER = 5  # overrides in one suggestion

_FEW = 2  # with fewer single overrides that are enough, sets of several are searched too

Need = Callable[[Config, int], int]  # bytes that a valid configuration needs on a number of ranks


def enough(
    cfg: Config, world: int, need: Need, available: int, kinds: list[list[Changes]]
) -> list[tuple[Changes, int]]:
    """(changes, bytes needed with them) for any function `need`, the least needed first.

    At most one change of each of the `kinds` is applied; its smallest change is first.
    """
    trial = Trial(cfg, world, need)
    single_changes = [
        (p, kind) for kind in kinds if (p := trial.best(kind, {}, available)) is not None
    ]
    helping = [pair for pair, _ in single_changes]
    sufficient = [pair for pair in helping if pair[1] <= available]
    others = [kind for pair, kind in single_changes if pair[1] > available]
    if len(sufficient) < _FEW and (together := _together(trial, others, available)):
        sufficient.append(together)
    return sorted(sufficient or helping, key=lambda pair: pair[1])


class Trial:
    """Bytes that a configuration needs with changes."""

    def __init__(self, cfg: Config, world: int, need: Need) -> None:
        self._cfg, self._world, self._need = cfg, world, need
        self.before = need(cfg, world)

    def best(
        self, kind: list[Changes], others: Changes, available: int
    ) -> tuple[Changes, int] | None:
        """The first of `kind` that is enough with `others`, else the one that saves most.

        None if none saves 1 %.
        """
        sizes = [(others | changes, self.size(others | changes)) for changes in kind]
        known = [(changes, size) for changes, size in sizes if size is not None]
        before = self.size(others) or self.before
        helping = [pair for pair in known if pair[1] < 0.99 * before]
        if fit := [pair for pair in helping if pair[1] <= available]:
            return fit[0]
        return min(helping, key=lambda pair: pair[1], default=None)

    def size(self, changes: Changes) -> int | None:
        """Bytes; None for a configuration that is not valid."""
        trial = changed(self._cfg, changes)
        ranks = trial.parallel.world_size or self._world
        try:
            validate(trial, ranks)
            return self._need(trial, ranks)
        except ConfigError:
            return None


def _together(
    trial: Trial, kinds: list[list[Changes]], available: int
) -> tuple[Changes, int] | None:
    """Several changes that are enough together, chosen greedily by what saves most."""
    chosen: Changes = {}
    left = list(kinds)
    for _ in range(_MOST_TOGETHER):
        tried = [(trial.best(kind, chosen, available), kind) for kind in left]
        helping = [(pair, kind) for pair, kind in tried if pair is not None]
        if not helping:
            return None
        (chosen, size), kind = min(helping, key=lambda item: item[0][1])
        left.remove(kind)
        if size <= available:
            return chosen, size
    return None


def halvings(size: int) -> list[int]:
    """Half of `size`, a quarter, ... down to 1."""
    return [size // 2**n for n in range(1, size.bit_length())]


_BF16: Mapping[str, Any] = {"precision.recipe": "bf16", "precision.dispatch": "auto"}
_NOTABLE = 1.01  # speeds that differ by less are not told apart


def fp8_gain(cfg: Config, world: int, machine: Machine) -> Choice | None:
    """Line on the speed of FP8, and on a faster override; None where nothing is in FP8.

    FP8 does not pay for every model: small experts gain less in products than it costs to quantise
    their rows, and tokens that travel in bf16 are quantised once all have arrived, so that their
    exchange is exposed.
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
