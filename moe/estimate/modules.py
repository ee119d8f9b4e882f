"""What computing a part of a layer again, or moving it to host memory, saves and costs; and the
cheapest set of parts with which a run fits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.configs.knobs import changed
from phalanx.configs.machines import Machine
from phalanx.configs.memory import OFFLOAD, RECOMPUTE
from phalanx.configs.schema import Config
from phalanx.configs.validate import is_valid
from phalanx.moe.estimate.memory import stage_memory
from phalanx.moe.estimate.timing import step_time

_WHOLE = ("moe", "full")
_KNOBS = {"run.recompute": RECOMPUTE, "run.offload": OFFLOAD}
Values = dict[str, list[str]]
"""Of both knobs."""
_NONE: Values = {"run.recompute": [], "run.offload": []}


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
    kept = changed(cfg, _NONE)
    memory, seconds = _peak(kept, world), step_time(kept, world, machine).total
    found = []
    for knob, name in _names():
        other = changed(cfg, _NONE | {knob: [name]})
        if not is_valid(other, world):
            continue
        saved = memory - _peak(other, world)
        if saved > 0:
            more = step_time(other, world, machine).total - seconds
            found.append(Part(knob, name, saved, more))
    return sorted(found, key=lambda part: part.seconds / part.saved)


def cheapest(
    cfg: Config, world: int, machine: Machine, fits: Callable[[Values], bool]
) -> Values | None:
    """Both knobs with names that are enough, and cost least of what has been tried: parts one by
    one, of which each is the cheapest a byte beside those before it, without what turns out to be
    in vain; MoE layers or all layers whole.

    Args:
        cfg, world, machine: as of `parts`.
        fits: whether values of both knobs are enough; asked of valid ones alone.
    """
    taken = _by_and_by(cfg, world, machine, fits)
    others = [n for n in taken["run.recompute"] if n not in ("expert_h", "moe_act")]
    found = [taken] if fits(taken) else []
    for whole in (
        {"run.recompute": [*others, "moe"], "run.offload": []},
        {"run.recompute": ["full"], "run.offload": []},
        {"run.recompute": ["full"], "run.offload": ["residual"]},
    ):
        if is_valid(changed(cfg, whole), world) and fits(whole):
            found.append(whole)
    return min(
        found,
        key=lambda values: step_time(changed(cfg, values), world, machine).total,
        default=None,
    )


def _by_and_by(cfg: Config, world: int, machine: Machine, fits: Callable[[Values], bool]) -> Values:
    """Parts until they are enough, or none is left."""
    taken: list[tuple[str, str]] = []
    left = [pair for pair in _names() if pair[1] not in _WHOLE]
    while not fits(_values(taken)):
        now = changed(cfg, _values(taken))
        peak, seconds = _peak(now, world), step_time(now, world, machine).total
        rates = {}
        for pair in left:
            other = changed(cfg, _values([*taken, pair]))
            if not is_valid(other, world) or (saved := peak - _peak(other, world)) <= 0:
                continue
            rates[pair] = (step_time(other, world, machine).total - seconds) / saved
        if not rates:
            break
        best = min(rates, key=lambda pair: rates[pair])
        taken.append(best)
        left.remove(best)
    for pair in list(taken):
        rest = [other for other in taken if other != pair]
        if fits(_values(rest)):
            taken = rest
    return _values(taken)


def _names() -> Iterator[tuple[str, str]]:
    for knob, names in _KNOBS.items():
        for name in names:
            yield knob, name


def _values(taken: list[tuple[str, str]]) -> Values:
    """In the order of the tables."""
    return {knob: [n for n in names if (knob, n) in taken] for knob, names in _KNOBS.items()}


def _peak(cfg: Config, world: int) -> int:
    return max(m.peak for m in stage_memory(cfg, world))
