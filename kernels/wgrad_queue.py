"""Weight gradients that wait until a backward pass has sent what others need first.

A pipeline stage computes the gradient of its input, sends it, and computes the gradients of its
weights while it would wait for the next transfer (zero-bubble pipelines, arXiv 2401.10241). Without
stages a layer sends the gradients of tokens to the ranks of these, and computes the gradients of
its weights beside that exchange. Backward passes submit the work here; whoever runs the schedule
opens a queue. Without an open queue work runs at once.

Work runs in the order in which it was submitted. All writes of a gradient buffer, and all that
follows them, such as the reduction of the buffer, go through the queue, so that results are the
same bit for bit.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

type Work = Callable[[], object]


class WgradQueue:
    """Work of the backward passes of a step.

    Args:
        held: number of backward passes whose work may wait beyond a pipeline's transfer. As many as
            there are stages before this one make the bubble smallest, and balance memory: an
            earlier stage saves that many more micro-batches. None: work waits for the next exchange
            of the backward pass.
    """

    def __init__(self, held: int | None) -> None:
        self.for_exchanges = held is None
        """Work waits for the next exchange of the backward pass, not for a pipeline's transfer."""
        self._held = held or 0
        self._passes: deque[list[Work]] = deque()
        self._current: list[Work] = []

    def append(self, work: Work) -> None:
        """Add work of the current backward pass."""
        self._current.append(work)

    def run_older(self) -> None:
        """End the current backward pass, and run the work of all but the last `held` passes."""
        if self._current:
            self._passes.append(self._current)
            self._current = []
        while len(self._passes) > self._held:
            _run(self._passes.popleft())

    def run_all(self) -> None:
        """Run all work."""
        while self._passes:
            _run(self._passes.popleft())
        _run(self._current)


@torch.no_grad()
def _run(pass_: list[Work]) -> None:
    pass_.reverse()
    while pass_:
        pass_.pop()()  # its operands are freed before the next work allocates


_open: WgradQueue | None = None
"""One for the process: backward passes run on a thread of autograd's."""


def is_open() -> bool:
    """True if work may wait: operands in buffers that others take must be copied."""
    return _open is not None


def submit(work: Work) -> None:
    """Run `work`, or leave it to the open queue."""
    if _open is None:
        work()
    else:
        _open.append(work)


def run_all() -> None:
    """Run all work of the open queue, if there is one."""
    if _open is not None:
        _open.run_all()


def waits_for_exchange() -> bool:
    """True if work of the open queue waits for the next exchange of the backward pass."""
    return _open is not None and _open.for_exchanges


def run_beside_exchange() -> None:
    """Run the work that waits for an exchange; one has started, and has not been waited for."""
    if waits_for_exchange():
        run_all()


@contextmanager
def opened(held: int | None) -> Iterator[WgradQueue]:
    """Open a queue; work that is left at the end, as after an error, is dropped.

    Args:
        held: see `WgradQueue`.
    """
    global _open
    assert _open is None
    _open = WgradQueue(held)
    try:
        yield _open
    finally:
        _open = None
