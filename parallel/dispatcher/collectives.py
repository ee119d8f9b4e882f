"""Exchanges by collectives, beside weight gradients, or beside a pass of another micro-batch.

The gradients of a layer's weights wait for the next exchange of the backward pass, start after it,
and hide it (`kernels.wgrad_queue`). Of a kernel that fills the GPU the CTAs that find no SM beside
the exchange start after it, when others have claimed their tiles.

Tensors of a collective belong to the stream that calls it, which waits for the collective before
they are freed: their memory needs no record of the other stream.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.tables.capabilities import WIRE
from phalanx.kernels import wgrad_queue
from phalanx.kernels.derivatives import in_backward

type Group = Callable[[], dist.ProcessGroup]
"""Process group of the next collective; all have the same ranks in the same order."""


class Passes(Protocol):
    """Process groups and exchanges of forward and backward passes."""

    @property
    def beside(self) -> bool: ...

    def groups(self, group: dist.ProcessGroup) -> Group:
        """Process groups of this one's ranks, disjoint from others. Collective over the job."""
        ...

    def each[T](self, make: Callable[[str], T]) -> Callable[[], T]:
        """Return a getter of the present pass's own object, which `make` makes by kind of pass."""
        ...


@dataclass(frozen=True)
class InTurn:
    """`Passes` that follow one another, and share everything."""

    beside: bool = False

    def groups(self, group: dist.ProcessGroup) -> Group:
        return lambda: group

    def each[T](self, make: Callable[[str], T]) -> Callable[[], T]:
        made = make("")
        return lambda: made


IN_TURN = InTurn()


class Collectives:
    """Collectives of a group of ranks.

    `beside`: passes of two micro-batches run beside each other, so that a pass waits for its own
    collectives alone, which are on streams of their own.
    """

    def __init__(self, group: Group, *, beside: bool = False) -> None:
        self._group, self._beside = group, beside
        self.size = group().size()  # ranks

    @contextmanager
    def during(self, x: Tensor, *, spreads: bool = False) -> Iterator[dist.ProcessGroup]:
        """Context of a collective of `x`, which the current stream waits for; yields its group.

        In a backward pass the current stream computes waiting weight gradients beside it. Without
        them and with passes in turn it is on the current stream. `spreads`: all of `x` goes to
        every rank, not a block of it to each.
        """
        group = self._group()
        # One rank exchanges nothing: weight gradients wait for the next exchange.
        hides = in_backward() and wgrad_queue.waits_for_exchange() and group.size() > 1
        if not x.is_cuda or not (hides or self._beside):
            with _paced(group, x, spreads):
                yield group
            if hides:  # on a CPU, in the order of a GPU
                wgrad_queue.run_beside_exchange()
            return
        with _exchange_stream(x.device) as stream, _paced(group, x, spreads):
            yield group
        if hides:
            wgrad_queue.run_beside_exchange()
        torch.cuda.current_stream(x.device).wait_stream(stream)

    def start(
        self, x: Tensor, collective: Callable[[dist.ProcessGroup], None]
    ) -> Callable[[], None]:
        """Start a collective that sends blocks of `x`, on a stream for exchanges.

        `collective` calls it over a group. Returns a function that lets the current stream wait for
        it, before which none of its tensors may be freed.
        """
        group, done = self._group(), None
        if x.is_cuda:
            with _exchange_stream(x.device) as stream:
                with _paced(group, x, spreads=False):
                    collective(group)
                done = stream.record_event()
        else:
            with _paced(group, x, spreads=False):
                collective(group)

        def wait() -> None:
            if done is not None:
                torch.cuda.current_stream(x.device).wait_event(done)

        return wait


def _paced(group: dist.ProcessGroup, x: Tensor, spreads: bool) -> AbstractContextManager[None]:
    if not os.environ.get("PHALANX_WIRE"):
        return nullcontext()
    paced: Callable[..., AbstractContextManager[None]] = resolve_name(WIRE)
    return paced(group, x, spreads=spreads)


@contextmanager
def _exchange_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Context of the stream for exchanges in the present pass, which waits for the current one."""
    stream = _stream(device, in_backward())
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


@functools.cache
def _stream(device: torch.device, backward: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
