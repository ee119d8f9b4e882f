"""The fastest layouts that fit, estimated as a dry run estimates them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from phalanx.configs.arithmetic.accounting import parameters
from phalanx.configs.arithmetic.layers import has_experts
from phalanx.configs.formats import grad_width, width
from phalanx.configs.knobs import Changes, changed, get
from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.estimate.memory import host_needed, needed
from phalanx.moe.estimate.resolve import resolved
from phalanx.moe.estimate.search.layouts import ALONE, Layout, layouts
from phalanx.moe.estimate.search.memory_sets import memory_sets
from phalanx.moe.estimate.search.ranking import ranking
from phalanx.moe.estimate.timing import step_time
from phalanx.moe.estimate.weights import stage_weights

_MOST_TRIED, _MOST_FITTING = 3000, 120
"""Layouts that are looked at, and those among them that fit: some ten seconds' worth."""
_RANKING_ERROR = 1.03
"""A layout that ranks behind the best ones by more than this is taken to be slower."""


@dataclass(frozen=True)
class Found:
    """A configuration that is valid and fits."""

    changes: Changes
    """Values that differ from the configuration that was searched from."""
    seconds: float
    """Expected step."""
    tokens: float
    """Expected tokens a second and GPU."""
    size: int
    """Bytes that the worst rank needs."""
    host: int
    """Bytes of host memory that it needs."""

    def beside(self, others: Changes) -> "Found":
        """The same, found from a configuration that had `others` already."""
        return replace(self, changes=others | self.changes)


def best(cfg: Config, world: int, machine: Machine, number: int) -> list[Found]:
    """The fastest configurations, at most one of the same parallel sizes; none if none fits.

    Args:
        cfg: as the user set it; model, batch, precision and optimizer stay.
        world: ranks.
        machine: rates and memory.
        number: of configurations.
    """
    found, fitting = dict[tuple[int, ...], Found](), 0
    if (given := estimated(cfg, {}, world, machine)) is not None:
        found[layout_of(cfg, world)[:5]] = given
    rank = ranking(cfg, world, machine)
    order = sorted(layouts(cfg, world, machine.node_gpus), key=rank)
    sets = sets_of(cfg, machine)
    for layout in order[:_MOST_TRIED]:
        times = sorted(each.seconds for each in found.values())[:number]
        enough = len(times) == number and rank(layout) > _RANKING_ERROR * times[-1]
        if enough or fitting == _MOST_FITTING:
            break
        one = fastest(cfg, layout, sets, world, machine)
        fitting += one is not None
        before = found.get(layout[:5])
        if one is not None and (before is None or one.seconds < before.seconds):
            found[layout[:5]] = one
    return sorted(found.values(), key=lambda each: each.seconds)[:number]


def estimated(cfg: Config, changes: Changes, world: int, machine: Machine) -> Found | None:
    """The estimate of a configuration with changes; None if it is not valid or does not fit."""
    trial = changed(cfg, changes)
    ranks = trial.parallel.world_size or world
    try:
        validate(trial, ranks)
        known = resolved(trial, ranks, machine.node_gpus)
    except ConfigError:
        return None
    size, host = needed(known, ranks), host_needed(known, ranks)
    if size > machine.room or host > machine.host_room:
        return None
    seconds = step_time(known, ranks, machine).total
    tokens = trial.data.global_batch * trial.data.sequence_length / ranks / seconds
    others = {path: value for path, value in changes.items() if get(cfg, path) != value}
    return Found(others, seconds, tokens, size, host)


def layout_of(cfg: Config, world: int) -> Layout:
    """The layout of a configuration as it is."""
    p = cfg.parallel
    sizes = (p.tensor, p.context, p.pipeline, p.virtual_pipeline)
    expert = expert_parallel_size(cfg, world)
    return Layout(*sizes, expert, cfg.data.micro_batch, overlap=False)


def sets_of(cfg: Config, machine: Machine) -> list[Changes]:
    """Sets of `memory_sets`, of the experts of one stage on a node."""
    expert = math.gcd(cfg.model.moe.experts, machine.node_gpus) if has_experts(cfg.model) else 1
    one = Layout(1, 1, 1, 1, expert, micro_batch=1, overlap=False).changes(cfg)
    one |= ALONE | {"data.global_batch": expert, "run.recompute": [], "run.offload": []}
    known = resolved(changed(cfg, one), expert, machine.node_gpus)
    return memory_sets(known, expert, machine)


def _may_fit(cfg: Config, layout: Layout, world: int, machine: Machine) -> bool:
    """Is a layout valid, and is there room for weights, gradients and optimizer?"""
    if _least_bytes(cfg, layout) > machine.room:
        return False
    trial = changed(cfg, layout.changes(cfg) | {"run.recompute": [], "run.offload": []})
    try:
        validate(trial, world)
    except ConfigError:
        return False
    states = (
        w.parameter_bytes + w.gradient_bytes + w.padding_bytes + w.optimizer_bytes
        for w in stage_weights(trial, world)
    )
    return max(states) < machine.room


def _least_bytes(cfg: Config, layout: Layout) -> float:
    """Bytes of a rank's weights and gradients, if stages and ranks share them evenly."""
    p = parameters(cfg.model)
    experts = p.routed_experts / (layout.expert * layout.pipeline)
    dense = (p.total - p.routed_experts) / (layout.tensor * layout.pipeline)
    return (experts + dense) * (width(cfg) + grad_width(cfg))


def fastest(
    cfg: Config, layout: Layout, sets: list[Changes], world: int, machine: Machine
) -> Found | None:
    """The first of the sets that fits with a layout; None if none does, or it is not valid."""
    if not _may_fit(cfg, layout, world, machine):
        return None
    for changes in _with_room(cfg, layout, sets, world, machine):
        if (one := estimated(cfg, changes, world, machine)) is not None:
            return one
    return None


def _with_room(
    cfg: Config, layout: Layout, sets: list[Changes], world: int, machine: Machine
) -> Iterator[Changes]:
    """Changes that seem to fit, without the delays and copies that `auto` leaves out then."""
    sizes = layout.changes(cfg)
    try:
        known = resolved(changed(cfg, sizes | sets[-1]), world, machine.node_gpus)
    except ConfigError:
        return
    known.parallel.delay_wgrad = "off"
    if needed(known, world) > machine.room:
        return
    for chosen in sets:
        if needed(changed(known, chosen), world) <= machine.room:
            yield sizes | chosen
