"""Weight gradients that wait until a backward pass has sent what others need, or for another pass.

A pipeline stage computes and sends the gradient of its input, and computes those of its weights
while it would wait for the next transfer (zero-bubble pipelines, arXiv 2401.10241). Without stages
a layer sends the gradients of tokens to their ranks, and computes those of its weights beside that
exchange; those that it submits beside another exchange are computed there. Backward passes submit
the work; whoever runs the schedule opens a queue. Without an open queue work runs at once.

Work runs in the order of submission. All writes of a gradient buffer, and all that follows them,
such as its reduction, go through the queue, so that results are the same bit for bit.

A queue may also pair work (`PairedWork`): the gradients of two backward passes for the same
parameters are computed together when the second one's turn has come, and their sums are rounded
once. What is left without a partner runs alone.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

type Work = Callable[[], object]


class PairedWork(Protocol):
    """Work that can run together with that of another backward pass."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """Parameters whose gradients it computes; at least one."""
        ...

    def __call__(self) -> object: ...

    def run_with(self, later: Any) -> object:
        """Run it and work of a later backward pass for the same parameters."""
        ...


class _Entry(NamedTuple):
    work: Work
    follows: Sequence[Tensor] = ()
    paired: PairedWork | None = None  # the work, if it may wait for a partner


class Waiting(NamedTuple):
    """Events for which the work of a queue waits."""

    held: int | None = None
    """Number of backward passes whose work may wait beyond a pipeline's transfer; None: no work
    waits for one. As many as there are stages before this one make the bubble smallest, and
    balance memory: an earlier stage saves that many more micro-batches."""
    exchanges: bool = False  # for the next exchange of the backward pass; not with `held`
    pairs: bool = False  # work that can be paired waits for a partner


AT_ONCE = Waiting()  # work waits for nothing


class WgradQueue:
    """Work of the backward passes of a step."""

    def __init__(self, waiting: Waiting) -> None:
        self.waiting = waiting
        self._passes: deque[list[_Entry]] = deque()
        self._current: list[_Entry] = []
        self._alone: dict[int, PairedWork] = {}  # by identity of each parameter
        self.in_flight = 0  # exchanges started and not ended: work need not wait

    @property
    def delays(self) -> bool:
        return self.waiting.held is not None or self.waiting.exchanges

    def append(self, entry: _Entry) -> None:
        if self.delays and not self.in_flight:
            self._current.append(entry)
        else:
            self._run(entry)

    def run_older(self) -> None:
        """End the current backward pass, and run the work of all but the last `held` passes."""
        if self._current:
            self._passes.append(self._current)
            self._current = []
        while len(self._passes) > (self.waiting.held or 0):
            self._run_pass(self._passes.popleft())

    def run_all(self) -> None:
        while self._passes:
            self._run_pass(self._passes.popleft())
        self._run_pass(self._current)
        while self._alone:
            self._run_alone(next(iter(self._alone)))

    def _run_pass(self, pass_: list[_Entry]) -> None:
        pass_.reverse()
        while pass_:
            self._run(pass_.pop())  # its operands are freed before the next work allocates

    @torch.no_grad()
    def _run(self, entry: _Entry) -> None:
        if self.waiting.pairs and entry.paired is not None:
            self._pair(entry.paired)
            return
        for parameter in entry.follows:
            self._run_alone(id(parameter))
        entry.work()

    def _pair(self, work: PairedWork) -> None:
        if (earlier := self._take(id(work.parameters[0]))) is not None:
            earlier.run_with(work)
        else:
            self._alone |= {id(parameter): work for parameter in work.parameters}

    @torch.no_grad()
    def _run_alone(self, parameter: int) -> None:
        if (work := self._take(parameter)) is not None:
            work()

    def _take(self, parameter: int) -> PairedWork | None:
        work = self._alone.get(parameter)
        if work is not None:
            for of_work in work.parameters:
                del self._alone[id(of_work)]
        return work


_open: WgradQueue | None = None  # one for the process: autograd has threads


def delays() -> bool:
    """True if work of any kind may wait: operands in buffers that others take must be copied."""
    return _open is not None and _open.delays


def submit(work: Work, follows: Iterable[Tensor] = ()) -> None:
    """Run `work`, which is not to be paired, or leave it to the open queue.

    Gradients of the parameters in `follows`, as far as they were submitted, are computed before.
    """
    if _open is None:
        work()
    else:
        _open.append(_Entry(work, tuple(follows)))


def submit_paired(work: PairedWork) -> None:
    """Run `work`, or leave it to the open queue, which may run it with that of another pass."""
    if _open is None:
        work()
    else:
        _open.append(_Entry(work, paired=work))


def run_all() -> None:
    """Run all work of the open queue, if there is one."""
    if _open is not None:
        _open.run_all()


def waits_for_exchange() -> bool:
    """True if work waits for the next exchange of the backward pass."""
    return _open is not None and _open.waiting.exchanges


def begin_exchange() -> None:
    """Run the work that waits for an exchange, and what is submitted until `end_exchange`, at once.

    An exchange of the backward pass has started, and nothing waits for it until then.
    """
    if _open is not None and _open.waiting.exchanges:
        _open.run_older()
        _open.in_flight += 1


def end_exchange() -> None:
    """End what `begin_exchange` began, before the current stream waits for the exchange."""
    if _open is not None and _open.waiting.exchanges:
        _open.in_flight -= 1


def run_beside_exchange() -> None:
    """Run the work that waits for an exchange; one has started, and is waited for next."""
    begin_exchange()
    end_exchange()


@contextmanager
def opened(waiting: Waiting) -> Iterator[WgradQueue]:
    """Open a queue; work that is left at the end, as after an error, is dropped."""
    global _open
    assert _open is None
    _open = WgradQueue(waiting)
    try:
        yield _open
    finally:
        _open = None
