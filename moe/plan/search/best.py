"""The fastest layouts that fit, estimated as a dry run estimates them."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from phalanx.configs.arithmetic.accounting import parameters
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import grad_width, width
from phalanx.configs.knobs import Changes, changed, get
from phalanx.configs.layout import expert_parallel_size, layout_problems
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.plan.cost.stages import host_needed, needed
from phalanx.moe.plan.cost.step_time import network_busy, step_time
from phalanx.moe.plan.cost.weights import stage_weights
from phalanx.moe.plan.described import resolved
from phalanx.moe.plan.search.layouts import ALONE, Layout, layouts, neighbours
from phalanx.moe.plan.search.memory_sets import MemorySet, memory_sets
from phalanx.moe.plan.search.ranking import ranking

TOLD_APART = 0.005
"""Part of a step by which one must be longer to count as slower: layouts of one model differ by
less than the estimate does from measured steps, but not by so little."""
_LEAST = 0.98
"""A step over its rank is at least this. Ranks have neither recomputation nor all that keeps a
pipeline waiting, but their weight gradients may wait a little less than those of a step."""
_LEAST_OF_SETS = 0.95
"""The same with the relative time of a memory set, which is that of another layout."""


@dataclass(frozen=True)
class Found:
    """A configuration that is valid and fits with the error of the estimate to spare."""

    changes: Changes  # values that differ from the configuration that was searched from
    seconds: float  # expected step
    tokens: float  # expected tokens a second and GPU
    size: int  # bytes that the worst rank needs
    host: int  # bytes of host memory that it needs
    busy: float  # part of a step in which its network is busy

    def beside(self, others: Changes) -> "Found":
        """The same, found from a configuration that had `others` already."""
        return replace(self, changes=others | self.changes)


def best(cfg: Config, world: int, machine: Machine, number: int) -> list[Found]:
    """The fastest configurations, each slower than the one before and of other parallel sizes.

    None if none fits. No layout one step from them or from `cfg` (`neighbours`) is faster than the
    first.

    Args:
        cfg: as the user set it; model, batch, precision and optimizer stay. Its layout need not be
            valid.
        world: ranks.
        machine: rates and memory.
        number: of configurations.
    """
    found, sets, own = dict[Layout, Found](), sets_of(cfg, machine), layout_of(cfg, world)
    given = estimated(cfg, {}, world, machine)

    def lines() -> list[tuple[Layout, Found]]:
        every = [*found.items(), *([(own, given)] if given is not None else [])]
        of_sizes = dict[tuple[int, ...], tuple[Layout, Found]]()
        for layout, one in told_apart(every, lambda each: each[1]):
            of_sizes.setdefault(layout[:5], (layout, one))
        return list(of_sizes.values())[:number]

    rank, limit = ranking(cfg, world, machine), math.inf
    for layout in sorted(layouts(cfg, world, machine.node_gpus), key=rank):
        least = _LEAST * rank(layout)
        if least > limit:
            break
        some = [each for each in sets if _LEAST_OF_SETS * each.relative * least <= limit]
        if (one := fastest(cfg, layout, some, world, machine)) is not None:
            found[layout] = one
            shown = lines()
            limit = shown[-1][1].seconds if len(shown) == number else math.inf
    looked_at = set(found)
    while near := _near([own, *(layout for layout, _ in lines())]) - looked_at:
        looked_at |= near
        for layout in near:
            if (one := fastest(cfg, layout, sets, world, machine)) is not None:
                found[layout] = one
    return [each for _, each in lines()]


def _near(several: Iterable[Layout]) -> set[Layout]:
    return {near for layout in several for near in (layout, *neighbours(layout))}


def told_apart[T](several: Iterable[T], found: Callable[[T], Found]) -> list[T]:
    """The fastest first, one for all that are as fast: the one with least memory.

    Args:
        several: in any order.
        found: estimate of one.
    """
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
    try:
        validate(trial, ranks)
        known = resolved(trial, ranks, machine.node_gpus)
    except ConfigError:
        return None
    size, host = needed(known, ranks), host_needed(known, ranks)
    if size > machine.safe_room or host > machine.host_room:
        return None
    seconds, busy = step_time(known, ranks, machine).total, network_busy(known, ranks, machine)
    tokens = trial.data.global_batch * trial.data.sequence_length / ranks / seconds
    others = {path: value for path, value in changes.items() if get(cfg, path) != value}
    return Found(others, seconds, tokens, size, host, busy)


def layout_of(cfg: Config, world: int) -> Layout:
    """The layout of a configuration as it is."""
    p = cfg.parallel
    sizes = (p.tensor, p.context, p.pipeline, p.virtual_pipeline)
    expert = expert_parallel_size(cfg, world)
    return Layout(*sizes, expert, cfg.data.micro_batch, overlap=False)


def sets_of(cfg: Config, machine: Machine) -> list[MemorySet]:
    """Sets of `memory_sets`, of the experts of one stage on a node."""
    expert = math.gcd(cfg.model.moe.experts, machine.node_gpus) if has_experts(cfg.model) else 1
    one = Layout(1, 1, 1, 1, expert, micro_batch=1, overlap=False).changes()
    one |= ALONE | {"data.global_batch": expert, "run.recompute": [], "run.offload": []}
    known = resolved(changed(cfg, one), expert, machine.node_gpus)
    return memory_sets(known, expert, machine)


def fastest(
    cfg: Config, layout: Layout, sets: list[MemorySet], world: int, machine: Machine
) -> Found | None:
    """A layout with the first of the sets that fits; None if none does, or it is not valid.

    Of a layout whose stages `cfg` lays out itself, with its stages or balanced ones.
    """
    both = [_fastest(cfg, sizes, sets, world, machine) for sizes in layout.stagings(cfg)]
    return min((one for one in both if one), key=lambda one: one.seconds, default=None)


def _fastest(
    cfg: Config, sizes: Changes, sets: list[MemorySet], world: int, machine: Machine
) -> Found | None:
    if not sets or not _may_fit(cfg, sizes, world, machine):
        return None
    for changes in _with_room(cfg, sizes, sets, world, machine):
        if (one := estimated(cfg, changes, world, machine)) is not None:
            return one
    return None


def _may_fit(cfg: Config, sizes: Changes, world: int, machine: Machine) -> bool:
    """Is a layout valid, and is there room for weights, gradients and optimizer?"""
    trial = changed(cfg, sizes | {"run.recompute": [], "run.offload": []})
    if _least_bytes(trial, world) > machine.safe_room or any(layout_problems(trial, world)):
        return False
    states = (
        w.parameter_bytes + w.gradient_bytes + w.padding_bytes + w.optimizer_bytes
        for w in stage_weights(trial, world)
    )
    return max(states) < machine.safe_room


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
        known = resolved(changed(cfg, sizes | sets[-1].changes), world, machine.node_gpus)
    except ConfigError:
        return
    known.parallel.delay_wgrad = "off"
    if needed(known, world) > machine.safe_room:
        return
    for each in sets:
        if needed(changed(known, each.changes), world) <= machine.safe_room:
            yield sizes | each.changes
