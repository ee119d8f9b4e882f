"""Scheduling of parallel test processes: order of files, and exclusive use of the machine."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Sort test files: those with ranks first, then those that need an idle machine, then others.

    The first take longest, so that the processes end together; those in the middle then seldom
    wait for ranks of other processes.
    """
    place = {}
    for item in items:
        alone, ranks = (item.get_closest_marker(name) is not None for name in ("alone", "dist"))
        own = 1 if alone else 0 if ranks else 2
        known = place.setdefault(item.path, own)
        place[item.path] = 1 if 1 in (own, known) else min(own, known)
    return sorted(items, key=lambda item: place[item.path])


@contextmanager
def shared(folder: Path, *, alone: bool) -> Iterator[None]:
    """Share the machine with other processes inside, or use it `alone`.

    Args:
        folder: folder of the two lock files, the same for all processes.
    """
    with open(folder / "gate.lock", "w") as gate, open(folder / "ranks.lock", "w") as ranks:
        fcntl.flock(gate, fcntl.LOCK_EX)  # a waiting exclusive user blocks new shared ones
        fcntl.flock(ranks, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
