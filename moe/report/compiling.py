"""Tells a person that kernels are loaded or compiled, which the first step on a GPU waits for."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.kernels import cache

_EVERY = 5.0
"""Seconds between lines."""


@contextmanager
def report_compilation(tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, `tell` a line at the first kernel, one now and then after, and one at the end.

    Without kernels of our own, as on a CPU, there is nothing to tell.
    """
    before, times = cache.statistics(), list[float]()

    def asked(label: str) -> None:
        now = time.monotonic()
        if not times:
            tell(f"kernels: loaded from {cache.folder()}, or compiled where they are not there yet")
        elif now - times[-1] >= _EVERY:
            tell(f"kernels: {_counts(before)} after {now - times[0]:.0f} s; next {label}")
        else:
            return
        times.append(now)

    with cache.watched(asked):
        yield
    if times:
        tell(f"kernels: ready, {_counts(before)} in {time.monotonic() - times[0]:.1f} s")


def _counts(before: cache.Statistics) -> str:
    now = cache.statistics()
    return f"{now.compiled - before.compiled} compiled, {now.loaded - before.loaded} loaded"
