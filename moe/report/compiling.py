"""Reports that kernels are loaded or compiled, which the first step on a GPU waits for."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from phalanx.kernels import cache

_EVERY = 10.0  # seconds between lines


@contextmanager
def report_compilation(report: Callable[[str], None]) -> Iterator[None]:
    """Report a line at the first kernel inside the block, one every 10 s, and one at the end.

    Those between come from a thread of their own: a single kernel may take longer.
    """
    before, began, label = cache.statistics(), list[float](), ""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(_EVERY):
            if began:
                seconds = time.monotonic() - began[0]
                report(f"kernels: {_counts(before)} after {seconds:.0f} s; now {label}")

    def on_kernel(name: str) -> None:
        nonlocal label
        label = name
        if not began:
            began.append(time.monotonic())
            report(f"kernels: loading from {cache.folder()}, compiling those that are not cached")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        with cache.watched(on_kernel):
            yield
    finally:
        ended.set()
        thread.join()
    if began:
        report(f"kernels: ready, {_counts(before)} in {time.monotonic() - began[0]:.1f} s")


def _counts(before: cache.Statistics) -> str:
    now = cache.statistics()
    return f"{now.compiled - before.compiled} compiled, {now.loaded - before.loaded} loaded"
