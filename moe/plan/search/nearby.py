"""The best next override of a run: the fastest that fits among layouts one step away."""

from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.search.best import (
    TOLD_APART,
    Found,
    fastest,
    layout_of,
    sets_of,
    told_apart,
)
from phalanx.moe.plan.search.layouts import neighbours


def next_override(cfg: Config, world: int, machine: Machine, seconds: float | None) -> Found | None:
    """The fastest configuration with one size doubled or halved, or other memory sets alone.

    Of those that are as fast it is the one with least memory.

    Args:
        cfg: valid, as set by the user.
        world: ranks.
        machine: rates and memory.
        seconds: the run's own step if it fits, which the override has to beat.
    """
    sets, own = sets_of(cfg, machine), layout_of(cfg, world)
    every = (fastest(cfg, near, sets, world, machine) for near in (own, *neighbours(own)))
    found = told_apart([one for one in every if one is not None], lambda one: one)
    if not found or (seconds is not None and (1 + TOLD_APART) * found[0].seconds > seconds):
        return None
    return found[0]
