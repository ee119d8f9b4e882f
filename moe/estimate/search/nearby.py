"""The best next override of a run: the fastest that fits among layouts one step away."""

from collections.abc import Iterator

from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.moe.estimate.search.best import Found, fastest, layout_of, sets_of
from phalanx.moe.estimate.search.layouts import Layout

_NOTABLE = 1.01
"""Speeds that differ by less are not told apart."""


def next_override(cfg: Config, world: int, machine: Machine, seconds: float | None) -> Found | None:
    """The fastest configuration with one size doubled or halved, or other memory sets alone.

    Args:
        cfg: valid, as set by the user.
        world: ranks.
        machine: rates and memory.
        seconds: the run's own step if it fits, which the override has to beat.
    """
    sets, found = sets_of(cfg, machine), list[Found]()
    for layout in _near(layout_of(cfg, world)):
        one = fastest(cfg, layout, sets, world, machine)
        if one is not None:
            found.append(one)
    best = min(found, key=lambda one: one.seconds, default=None)
    if best is not None and seconds is not None and _NOTABLE * best.seconds > seconds:
        return None
    return best


def _near(own: Layout) -> Iterator[Layout]:
    yield own
    for name in ("tensor", "context", "pipeline", "chunks", "expert", "micro_batch"):
        size = getattr(own, name)
        for other in (2 * size, size // 2):
            if other:
                yield own._replace(**{name: other})
