"""Savings and cost of recomputing or offloading parts of layers, and the cheapest set that fits."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.configs.knobs import changed
from phalanx.configs.schema import Config
from phalanx.configs.tables.activation_memory import OFFLOAD, RECOMPUTE
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import is_valid
from phalanx.moe.plan.cost.stages import stage_memory
from phalanx.moe.plan.cost.step_time import step_time

_FULL_LAYERS = ("moe", "full")
_KNOBS = {"run.recompute": RECOMPUTE, "run.offload": OFFLOAD}
Values = dict[str, list[str]]  # values of run.recompute and run.offload
_NONE: Values = {"run.recompute": [], "run.offload": []}


@dataclass(frozen=True)
class MemoryOption:
    """One name of a knob, applied alone."""

    knob: str
    name: str
    saved: int  # bytes saved on the stage that needs most
    seconds: float  # seconds added to a step


def memory_options(cfg: Config, world: int, machine: Machine) -> list[MemoryOption]:
    """Every name of both knobs that saves memory in this run, the cheapest per byte first.

    Kernels and graph of `cfg` are resolved (`moe.plan.described`).
    """
    baseline = changed(cfg, _NONE)
    memory, seconds = _peak(baseline, world), step_time(baseline, world, machine).total
    options = []
    for knob, name in _names():
        other = changed(cfg, _NONE | {knob: [name]})
        if not is_valid(other, world):
            continue
        saved = memory - _peak(other, world)
        if saved > 0:
            more = step_time(other, world, machine).total - seconds
            options.append(MemoryOption(knob, name, saved, more))
    return sorted(options, key=lambda option: option.seconds / option.saved)


def cheapest(
    cfg: Config, world: int, machine: Machine, fits: Callable[[Values], bool]
) -> Values | None:
    """The values of both knobs that are enough and add the least time; None if none are enough.

    Candidates: names added greedily, each the cheapest per byte after those before it, without
    the ones that turn out unnecessary; full MoE layers; full layers. `fits` tells whether values of
    both knobs are enough, and is called with valid ones only.
    """
    taken = _greedy(cfg, world, machine, fits)
    others = [n for n in taken["run.recompute"] if n not in ("expert_h", "moe_act")]
    candidates = [taken] if fits(taken) else []
    for full in (
        {"run.recompute": [*others, "moe"], "run.offload": []},
        {"run.recompute": ["full"], "run.offload": []},
        {"run.recompute": ["full"], "run.offload": ["residual"]},
    ):
        if is_valid(changed(cfg, full), world) and fits(full):
            candidates.append(full)
    return min(
        candidates,
        key=lambda values: step_time(changed(cfg, values), world, machine).total,
        default=None,
    )


def _greedy(cfg: Config, world: int, machine: Machine, fits: Callable[[Values], bool]) -> Values:
    """Names added one by one, the cheapest per byte first, until they are enough or none is left.

    Then drops every name without which the others are enough.
    """
    taken: list[tuple[str, str]] = []
    left = [pair for pair in _names() if pair[1] not in _FULL_LAYERS]
    while not fits(_values(taken)):
        current = changed(cfg, _values(taken))
        peak, seconds = _peak(current, world), step_time(current, world, machine).total
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
    """Knob values of chosen (knob, name) pairs, in the order of the tables."""
    return {knob: [n for n in names if (knob, n) in taken] for knob, names in _KNOBS.items()}


def _peak(cfg: Config, world: int) -> int:
    return max(m.peak for m in stage_memory(cfg, world))
