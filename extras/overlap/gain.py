"""Gain of `parallel.overlap_microbatches`: the time that it saves and the memory it takes."""

from typing import NamedTuple

from phalanx.configs.knobs import changed
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.cost.stages import needed
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.text import storage

_WORTHWHILE = 0.03  # smallest part of a step that `auto` overlaps for: estimates are no better


class OverlapEffect(NamedTuple):
    """Gain and cost of overlapping micro-batches, by the estimate."""

    hidden: float  # hidden part of the exchanges that are exposed without
    saved: float  # saved part of the step without
    needed: int  # bytes that a rank needs
    more: int  # bytes that it needs more than without

    @property
    def worthwhile(self) -> bool:
        return self.saved >= _WORTHWHILE

    def __str__(self) -> str:
        parts = f"{self.hidden:.0%} of exchanges, {self.saved:.0%} of the step"
        return f"hides {parts}, for {storage(self.more)} of activations (estimate)"


def overlap_effect(cfg: Config, world: int, machine: Machine) -> OverlapEffect:
    """Effect for a configuration, valid and without `auto`, whose micro-batches can overlap."""
    off, on = (changed(cfg, {"parallel.overlap_microbatches": v}) for v in ("off", "on"))
    before, after = (step_time(trial, world, machine) for trial in (off, on))
    hidden = 1 - after.exchange / before.exchange if before.exchange else 0.0
    saved, needs = 1 - after.total / before.total, needed(on, world)
    return OverlapEffect(hidden, saved, needs, needs - needed(off, world))
