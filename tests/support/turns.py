"""Test processes side by side: order of the files, and who may use the machine alone."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files with ranks first, then those that need an idle machine, then the others.

    The first take longest, so that the processes end together; those in the middle then seldom
    wait for ranks of the other processes.
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
    """Inside, nobody is `alone` in another process, or nobody else is inside.

    Args:
        folder: of the two lock files, the same for all processes.
    """
    with open(folder / "gate.lock", "w") as gate, open(folder / "ranks.lock", "w") as ranks:
        fcntl.flock(gate, fcntl.LOCK_EX)  # so that those who want to be alone get their turn
        fcntl.flock(ranks, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield
