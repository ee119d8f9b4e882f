"""Reports that kernels are loaded or compiled, which the first step on a GPU waits for."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.kernels import cache

_EVERY = 5.0  # seconds between lines


@contextmanager
def report_compilation(report: Callable[[str], None]) -> Iterator[None]:
    """Report a line at the first kernel inside the block, one every few seconds, one at the end."""
    before, times = cache.statistics(), list[float]()

    def on_kernel(label: str) -> None:
        now = time.monotonic()
        if not times:
            report(f"kernels: loading from {cache.folder()}, compiling those that are not cached")
        elif now - times[-1] >= _EVERY:
            report(f"kernels: {_counts(before)} after {now - times[0]:.0f} s; next {label}")
        else:
            return
        times.append(now)

    with cache.watched(on_kernel):
        yield
    if times:
        report(f"kernels: ready, {_counts(before)} in {time.monotonic() - times[0]:.1f} s")


def _counts(before: cache.Statistics) -> str:
    now = cache.statistics()
    return f"{now.compiled - before.compiled} compiled, {now.loaded - before.loaded} loaded"
