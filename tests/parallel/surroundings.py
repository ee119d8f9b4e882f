"""Surroundings of a process: a disk without space, modules that stand for others."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    """Context in which this process makes no file longer than `room` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextmanager
def standing_for(name: str, module: Any) -> Iterator[None]:
    """A module for another; `mock.patch.dict` would drop those that are imported meanwhile."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before
