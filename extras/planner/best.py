"""The fastest layouts that fit, estimated as a dry run does, in the order of a quick estimate."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from phalanx.configs.arithmetic.accounting import parameters
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import grad_width, is_fp8, width
from phalanx.configs.knobs import Changes, changed, get
from phalanx.configs.layout import expert_parallel_size, layout_problems
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import ConfigError, is_valid
from phalanx.extras.planner.layouts import ALONE, Layout, MemorySet, memory_sets, neighbours
from phalanx.extras.planner.ranking import in_order
from phalanx.moe.plan.cost.stages import host_needed, needed
from phalanx.moe.plan.cost.step_time import (
    busiest,
    network_seconds,
    step_time,
    with_natural_routing,
)
from phalanx.moe.plan.cost.weights import stage_weights
from phalanx.moe.plan.described import resolved

TOLD_APART = 0.005
"""Part of a step by which one must be longer to count as slower: layouts of one model differ by
less than the estimate does from measured steps, but not by so little."""
_LEAST = 0.98
"""A step over its rank is at least this. Ranks have neither recomputation nor all that keeps a
pipeline waiting, but their weight gradients may wait a little less than those of a step."""
_LEAST_WITH_GRADIENTS = 0.8
"""The same with gradients and update: exchanges that micro-batches hide are in some ranks."""
_LOOKED_AT = 1.05
"""Slower layouts than this over the last line are no candidates: a line may still disappear beside
one that needs less memory."""
_LEAST_OF_SETS = 0.95  # the same with the relative time of a memory set, of another layout


@dataclass(frozen=True)
class Found:
    """A configuration that is valid and fits with the error of the estimate to spare."""

    changes: Changes  # values that differ from the configuration that was searched from
    seconds: float  # expected step
    tokens: float  # expected tokens a second and GPU
    natural: float  # the same with natural routing
    size: int  # bytes that the worst rank needs
    host: int  # bytes of host memory that it needs
    busy: float  # part of a step in which its network is busy

    def beside(self, others: Changes) -> "Found":
        """The same, found from a configuration that had `others` already."""
        return replace(self, changes=others | self.changes)


def best(cfg: Config, world: int, machine: Machine, number: int) -> list[Found]:
    """The fastest configurations, each slower than the one before and of other parallel sizes.

    None if none fits. No layout one step from them or from `cfg` (`neighbours`) is faster than the
    first. Model, batch, precision and optimizer of `cfg` stay; its layout need not be valid.
    """
    found, sets, own = dict[Layout, Found](), sets_of(cfg, machine), layout_of(cfg, world)
    given = estimated(cfg, {}, world, machine)

    def lines() -> list[tuple[Layout, Found]]:
        every = [*found.items(), *([(own, given)] if given is not None else [])]
        of_sizes = dict[tuple[int, ...], tuple[Layout, Found]]()
        for layout, one in told_apart(every, lambda each: each[1]):
            of_sizes.setdefault(layout[:5], (layout, one))
        return list(of_sizes.values())[:number]

    limit = math.inf
    for rank, more, layout in in_order(cfg, world, machine):
        if (least := _LEAST * rank) > limit:
            break
        slowest = _LOOKED_AT * limit
        if _LEAST_WITH_GRADIENTS * (rank + more) > slowest:
            continue
        some = [each for each in sets if _LEAST_OF_SETS * each.relative * least <= limit]
        if (one := fastest(cfg, layout, some, world, machine, slowest)) is not None:
            found[layout] = one
            shown = lines()
            limit = shown[-1][1].seconds if len(shown) == number else math.inf
    looked_at, shown = set(found), lines()
    while near := _near(cfg, [own, *(layout for layout, _ in shown)]) - looked_at:
        looked_at |= near
        slowest = _LOOKED_AT * limit
        for layout in near:
            if (one := fastest(cfg, layout, sets, world, machine, slowest)) is not None:
                found[layout] = one
        shown = lines()
        limit = shown[-1][1].seconds if len(shown) == number else math.inf
    return [each for _, each in shown]


def _near(cfg: Config, several: Sequence[Layout]) -> set[Layout]:
    # `auto` may keep more FP8 copies beside overlap than a layout that is told to overlap.
    as_set = [layout._replace(overlap="") for layout in several] if is_fp8(cfg) else []
    return {near for layout in several for near in (layout, *neighbours(layout))} | {*as_set}


def told_apart[T](several: Iterable[T], found: Callable[[T], Found]) -> list[T]:
    """The fastest first, one for all that are as fast: the one with least memory."""
    groups = list[list[T]]()
    for each in sorted(several, key=lambda each: found(each).seconds):
        if groups and found(each).seconds <= (1 + TOLD_APART) * found(groups[-1][0]).seconds:
            groups[-1].append(each)
        else:
            groups.append([each])
    return [min(group, key=lambda each: found(each).size) for group in groups]


def estimated(cfg: Config, changes: Changes, world: int, machine: Machine) -> Found | None:
    """The estimate of a configuration with changes.

    None if it is not valid, or does not fit with the error of the estimate to spare.
    """
    trial = changed(cfg, changes)
    ranks = trial.parallel.world_size or world
    if not is_valid(trial, ranks) or (known := _fitting(trial, ranks, machine)) is None:
        return None
    return _found(cfg, changes, known, ranks, machine)


def _fitting(trial: Config, ranks: int, machine: Machine) -> Config | None:
    """A configuration without `auto`; None if it cannot run, or does not fit with some to spare."""
    try:
        known = resolved(trial, ranks, machine.node_gpus)
    except ConfigError:
        return None
    size, host = needed(known, ranks), host_needed(known, ranks)
    return None if size > machine.safe_room or host > machine.host_room else known


def _found(cfg: Config, changes: Changes, known: Config, ranks: int, machine: Machine) -> Found:
    """The estimate of changes that give a configuration, which is `known` without `auto`."""
    size, host = needed(known, ranks), host_needed(known, ranks)
    step = step_time(known, ranks, machine)
    busy = network_seconds(known, ranks, machine) / step.total
    tokens = known.data.global_batch * known.data.sequence_length / ranks
    natural = tokens / with_natural_routing(step, busiest(known, ranks)).total
    others = {path: value for path, value in changes.items() if get(cfg, path) != value}
    return Found(others, step.total, tokens / step.total, natural, size, host, busy)


def layout_of(cfg: Config, world: int) -> Layout:
    """The layout of a configuration as it is."""
    p = cfg.parallel
    sizes = (p.tensor, p.context, p.pipeline, p.virtual_pipeline)
    expert = expert_parallel_size(cfg, world)
    return Layout(*sizes, expert, cfg.data.micro_batch)


def sets_of(cfg: Config, machine: Machine) -> list[MemorySet]:
    """Sets of `memory_sets`, of the experts of one stage on a node."""
    expert = math.gcd(cfg.model.moe.experts, machine.node_gpus) if has_experts(cfg.model) else 1
    one = Layout(1, 1, 1, 1, expert, micro_batch=1).changes()
    one |= ALONE | {"data.global_batch": expert, "run.recompute": [], "run.offload": []}
    known = resolved(changed(cfg, one), expert, machine.node_gpus)
    return memory_sets(known, expert, machine)


def fastest(
    cfg: Config,
    layout: Layout,
    sets: list[MemorySet],
    world: int,
    machine: Machine,
    slowest: float = math.inf,
) -> Found | None:
    """A layout with the first of the sets that fits, if a step takes at most `slowest` seconds.

    None if none does, or it is not valid. Of a layout whose stages `cfg` lays out itself, with its
    stages or balanced ones.
    """
    both = [_fastest(cfg, sizes, sets, world, machine, slowest) for sizes in layout.stagings(cfg)]
    return min((one for one in both if one), key=lambda one: one.seconds, default=None)


def _fastest(
    cfg: Config,
    sizes: Changes,
    sets: list[MemorySet],
    world: int,
    machine: Machine,
    slowest: float,
) -> Found | None:
    if not sets or not _may_fit(cfg, sizes, world, machine):
        return None
    for changes in _with_room(cfg, sizes, sets, world, machine):
        trial = changed(cfg, changes)
        ranks = trial.parallel.world_size or world
        if (known := _fitting(trial, ranks, machine)) is None:
            continue
        if step_time(known, ranks, machine).total > slowest:
            return None
        if is_valid(trial, ranks):
            return _found(cfg, changes, known, ranks, machine)
    return None


def _may_fit(cfg: Config, sizes: Changes, world: int, machine: Machine) -> bool:
    """True if a layout is valid, and has room for weights, gradients and optimizer."""
    trial = changed(cfg, sizes | {"run.recompute": [], "run.offload": []})
    if _least_bytes(trial, world) > machine.safe_room or any(layout_problems(trial, world)):
        return False
    return max(w.device_bytes for w in stage_weights(trial, world)) < machine.safe_room


def _least_bytes(cfg: Config, world: int) -> float:
    """Bytes of a rank's weights and gradients, if stages and ranks share them evenly."""
    counts, p = parameters(cfg.model), cfg.parallel
    experts = counts.routed_experts / (expert_parallel_size(cfg, world) * p.pipeline)
    dense = (counts.total - counts.routed_experts) / (p.tensor * p.pipeline)
    return (experts + dense) * (width(cfg) + grad_width(cfg))


def _with_room(
    cfg: Config, sizes: Changes, sets: list[MemorySet], world: int, machine: Machine
) -> Iterator[Changes]:
    """Changes that seem to fit, without the delays and copies that `auto` leaves out then."""
    try:
        trial = changed(cfg, sizes | sets[-1].changes)
        known = resolved(trial, world, machine.node_gpus, delays=False)
    except ConfigError:
        return
    if needed(known, world) > machine.safe_room:
        return
    for each in sets:
        if needed(changed(known, each.changes), world) <= machine.safe_room:
            yield sizes | each.changes


def next_override(cfg: Config, world: int, machine: Machine, seconds: float | None) -> Found | None:
    """The fastest configuration with one size doubled or halved, or other memory sets alone.

    Of those that are as fast it is the one with least memory. The override has to beat `seconds`,
    the run's own step if it fits.
    """
    sets, own = sets_of(cfg, machine), layout_of(cfg, world)
    every = (fastest(cfg, near, sets, world, machine) for near in (own, *neighbours(own)))
    found = told_apart([one for one in every if one is not None], lambda one: one)
    if not found or (seconds is not None and (1 + TOLD_APART) * found[0].seconds > seconds):
        return None
    return found[0]
