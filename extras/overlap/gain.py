"""Gain of `parallel.overlap_microbatches`: the time that it saves and the memory it takes."""

from dataclasses import dataclass
from functools import cached_property

from phalanx.configs.knobs import changed, copied
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.cost.stages import needed
from phalanx.moe.plan.cost.step_time import StepTime, step_time
from phalanx.moe.text import storage

_KNOB = "parallel.overlap_microbatches"
_WORTHWHILE = 0.03  # smallest part of a step that `auto` overlaps for: estimates are no better


@dataclass(frozen=True)
class OverlapEffect:
    """Gain and cost of overlapping micro-batches, by the estimate, which is made when asked for."""

    cfg: Config
    world: int
    machine: Machine

    @cached_property
    def _both(self) -> tuple[Config, Config]:
        """The configuration without, and with."""
        off, on = (changed(self.cfg, {_KNOB: value}) for value in ("off", "on"))
        return off, on

    @cached_property
    def _steps(self) -> tuple[StepTime, StepTime]:
        off, on = (step_time(cfg, self.world, self.machine) for cfg in self._both)
        return off, on

    @property
    def hidden(self) -> float:
        """Part of the exchanges that are exposed without."""
        off, on = self._steps
        return 1 - on.exchange / off.exchange if off.exchange else 0.0

    @property
    def saved(self) -> float:
        """Part of the step without."""
        off, on = self._steps
        return 1 - on.total / off.total

    @property
    def worthwhile(self) -> bool:
        """True if it saves more than the error of estimates."""
        return self.saved >= _WORTHWHILE

    @property
    def needed(self) -> int:
        """Bytes that a rank needs."""
        return needed(self._both[1], self.world)

    def __str__(self) -> str:
        parts = f"{self.hidden:.0%} of exchanges, {self.saved:.0%} of the step"
        more = self.needed - needed(self._both[0], self.world)
        return f"hides {parts}, for {storage(more)} of activations (estimate)"


def overlap_effect(cfg: Config, world: int, machine: Machine) -> OverlapEffect:
    """Effect for a configuration, valid and without `auto`, whose micro-batches can overlap."""
    return OverlapEffect(copied(cfg), world, machine)
