"""Choice of `parallel.overlap_microbatches`, by the time that it saves and the memory it takes."""

from typing import NamedTuple

from phalanx.configs.knobs import changed
from phalanx.configs.layout import forced_overlap_error, micro_batches, not_overlappable
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.tables.machines import Machine
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError
from phalanx.moe.plan.cost.stages import needed
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.text.units import storage

_WORTHWHILE = 0.03
"""Smallest part of a step that `auto` overlaps micro-batches for: estimates are no better."""


class MicrobatchOverlap(NamedTuple):
    """Value of the knob without `auto`, and the reason."""

    value: str
    """`on` or `off`."""
    reason: str
    """Clauses separated by semicolons."""


def microbatch_overlap(
    cfg: Config, world: int, machine: Machine, available: int
) -> MicrobatchOverlap:
    """Choice for a configuration without `auto` in kernels, transport and device.

    Args:
        cfg: valid on `world` ranks.
        world: ranks.
        machine: rates of the estimate.
        available: bytes that a rank may need.

    Raises:
        ConfigError: `on` is forced and cannot run.
    """
    wanted = cfg.parallel.overlap_microbatches
    setting = "auto" if wanted == "auto" else f"parallel.overlap_microbatches={wanted}"
    if wanted == "off":
        return MicrobatchOverlap("off", setting)
    if reason := not_overlappable(cfg):
        if wanted == "on":
            raise ConfigError(forced_overlap_error(reason))
        return MicrobatchOverlap("off", f"{setting}; {reason}")
    if wanted == "auto" and (reason := _left_by_auto(cfg, world)):
        return MicrobatchOverlap("off", f"{setting}; {reason}")
    effect = overlap_effect(cfg, world, machine)
    if wanted == "auto" and effect.saved < _WORTHWHILE:
        return MicrobatchOverlap("off", f"{setting}; not worth it: {effect}")
    if wanted == "auto" and effect.needed > available:
        short = f"{storage(effect.needed)} of {storage(available)} would be needed"
        return MicrobatchOverlap("off", f"{setting}; {short}: {effect}")
    return MicrobatchOverlap("on", f"{setting}; {effect}")


def _left_by_auto(cfg: Config, world: int) -> str | None:
    """Reason for which `auto` leaves it, whatever the estimate says; None if there is none."""
    if cfg.run.device == "cpu":
        return "a CPU computes one pass at a time"
    if expert_backend(cfg.kernels.backend).host_counts:
        return f"{cfg.kernels.backend} experts have the host wait for each pass"
    facts = TRANSPORTS[cfg.parallel.dispatch]
    if facts.one_rank:
        return "all experts are on one rank, which exchanges nothing"
    if not facts.collective:
        return f"{cfg.parallel.dispatch} overlaps its exchanges with experts"
    if micro_batches(cfg, world) == 1:
        return "a step has one micro-batch"
    return None


class OverlapEffect(NamedTuple):
    """Gain and cost of overlapping micro-batches, by the estimate."""

    hidden: float
    """Hidden part of the exchanges that are exposed without."""
    saved: float
    """Saved part of the step without."""
    needed: int
    """Bytes that a rank needs."""
    more: int
    """Bytes that it needs more than without."""

    def __str__(self) -> str:
        parts = f"{self.hidden:.0%} of exchanges, {self.saved:.0%} of the step"
        return f"hides {parts}, for {storage(self.more)} of activations (estimate)"


def overlap_effect(cfg: Config, world: int, machine: Machine) -> OverlapEffect:
    """Effect for a configuration whose micro-batches can overlap; arguments as above."""
    off, on = (changed(cfg, {"parallel.overlap_microbatches": v}) for v in ("off", "on"))
    before, after = (step_time(trial, world, machine) for trial in (off, on))
    saved, needs = before.exchange - after.exchange, needed(on, world)
    hidden = saved / before.exchange if before.exchange else 0.0
    return OverlapEffect(hidden, saved / before.total, needs, needs - needed(off, world))
