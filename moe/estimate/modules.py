"""What computing a part of a layer again, or moving it to host memory, saves and costs; and the
cheapest set of parts with which a run fits."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.configs.knobs import put
from phalanx.configs.machines import Machine
from phalanx.configs.memory import OFFLOAD, RECOMPUTE
from phalanx.configs.schema import Config
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.estimate.memory import stage_memory
from phalanx.moe.estimate.timing import step_time

_WHOLE = ("moe", "full")
_KNOBS = {"run.recompute": RECOMPUTE, "run.offload": OFFLOAD}
NONE: dict[str, Any] = {"run.recompute": [], "run.offload": []}
"""All is kept."""


@dataclass(frozen=True)
class Part:
    """One name of a knob, alone."""

    knob: str
    name: str
    saved: int
    """Bytes of the stage that needs most."""
    seconds: float
    """Of a step, more."""


def parts(cfg: Config, world: int, machine: Machine) -> list[Part]:
    """Of all that this run could compute again or move, what saves anything; the cheapest a byte
    first.

    Args:
        cfg: valid, with resolved kernels and graph (`moe.estimate.resolved`).
        world: ranks.
        machine: its rates.
    """
    kept = _with(cfg, NONE)
    memory, seconds = _peak(kept, world), step_time(kept, world, machine).total
    found = []
    for knob, name in _names():
        other = _with(cfg, NONE | {knob: [name]})
        if not _valid(other, world):
            continue
        saved = memory - _peak(other, world)
        if saved > 0:
            more = step_time(other, world, machine).total - seconds
            found.append(Part(knob, name, saved, more))
    return sorted(found, key=lambda part: part.seconds / part.saved)


def cheapest(
    cfg: Config, world: int, known: list[Part], fits: Callable[[dict[str, Any]], bool]
) -> dict[str, Any] | None:
    """Both knobs with names that are enough: those that cost least a byte, none of them in vain.

    Args:
        cfg: valid, as given.
        world: ranks.
        known: of `parts`.
        fits: whether values of both knobs are enough; asked of valid ones alone.
    """
    taken: list[Part] = []
    for part in known:
        if part.name in _WHOLE or not _valid(_with(cfg, _values([*taken, part])), world):
            continue
        taken.append(part)
        if fits(_values(taken)):
            for less in sorted(taken, key=lambda part: -part.seconds):
                rest = [part for part in taken if part is not less]
                if fits(_values(rest)):
                    taken = rest
            return _values(taken)
    others = [n for n in _values(taken)["run.recompute"] if n not in ("expert_h", "moe_act")]
    for last in (
        {"run.recompute": [*others, "moe"], "run.offload": []},
        {"run.recompute": ["full"], "run.offload": []},
        {"run.recompute": ["full"], "run.offload": ["residual"]},
    ):
        if _valid(_with(cfg, last), world) and fits(last):
            return last
    return None


def _names() -> Iterator[tuple[str, str]]:
    for knob, names in _KNOBS.items():
        for name in names:
            yield knob, name


def _values(taken: list[Part]) -> dict[str, Any]:
    """In the order of the tables."""
    chosen = {(part.knob, part.name) for part in taken}
    return {knob: [n for n in names if (knob, n) in chosen] for knob, names in _KNOBS.items()}


def _with(cfg: Config, values: dict[str, Any]) -> Config:
    changed = copy.deepcopy(cfg)
    for path, value in values.items():
        put(changed, path, value)
    return changed


def _valid(cfg: Config, world: int) -> bool:
    try:
        validate(cfg, world)
    except ConfigError:
        return False
    return True


def _peak(cfg: Config, world: int) -> int:
    return max(m.peak for m in stage_memory(cfg, world))
