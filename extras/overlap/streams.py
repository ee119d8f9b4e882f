"""Streams of two passes, places at which passes wait, and transfers between pipeline stages.

On a CPU there are no streams.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

Event = torch.cuda.Event | None  # event after work of a stream; None on a CPU

TRANSFERS = 2  # number of the stream for transfers; passes are on 0 and 1


class Streams:
    """Streams of a device, by number."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in range(3)] if self._cuda else []

    def on(self, number: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._streams[number]) if self._cuda else nullcontext()

    def event(self) -> Event:
        return torch.cuda.current_stream().record_event() if self._cuda else None

    def wait(self, *events: Event) -> None:
        for event in events:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)


class Places:
    """Places in layers at which forward passes wait for the backward pass beside them."""

    def __init__(self, event: Callable[[], Event]) -> None:
        self._event = event
        self.reached: list[Event] = []
        """Events at the places of the backward pass that was issued last, in its order."""
        self._awaited: Iterator[Event] = iter(())

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Inside is a forward pass beside the backward pass that was issued last, if any.

        The next backward pass reaches places anew.
        """
        self._awaited, self.reached = iter(self.reached), []
        try:
            yield
        finally:
            self._awaited = iter(())

    def next(self) -> Event:
        return next(self._awaited, None)

    def note(self, tensor: torch.Tensor) -> None:
        """Let the backward pass reach the place when it has the gradient of a tensor."""
        if tensor.requires_grad:
            tensor.register_hook(lambda _: self.reached.append(self._event()))


class Arrived(NamedTuple):
    """Tensors for the passes of the next slot; None where there is no such pass."""

    input: Tensor | None = None  # input of the forward pass
    gradient: Tensor | None = None  # gradient of the output of the backward pass


class StageTransfers:
    """Exchange of activations and gradients with neighbouring stages, in one group of NCCL."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device) -> None:
        self._group, self._dtype, self._device = group, dtype, device
        stage, stages = group.rank(), group.size()
        self._next, self._previous = (
            dist.get_global_rank(group, (stage + step) % stages) for step in (1, -1)
        )

    def __call__(
        self,
        shape: tuple[int, ...],
        *,
        output: Tensor | None,
        gradient: Tensor | None,
        awaits_input: bool,
        awaits_gradient: bool,
    ) -> Arrived:
        """Send `output` to the next stage and `gradient` to the previous one, and receive theirs.

        All are of one shape; the current stream waits for the end.
        """
        arrived = Arrived(
            self._empty(shape, requires_grad=True) if awaits_input else None,
            self._empty(shape) if awaits_gradient else None,
        )
        # Activations before gradients on all ranks: with two stages both go to the same rank, where
        # messages are matched in the order of their calls.
        ways = [
            (dist.isend, output, self._next),
            (dist.irecv, arrived.input, self._previous),
            (dist.isend, gradient, self._previous),
            (dist.irecv, arrived.gradient, self._next),
        ]
        ops = [
            dist.P2POp(way, tensor.detach(), peer, self._group)
            for way, tensor, peer in ways
            if tensor is not None
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return arrived

    def _empty(self, shape: tuple[int, ...], requires_grad: bool = False) -> Tensor:
        return torch.empty(
            shape, dtype=self._dtype, device=self._device, requires_grad=requires_grad
        )
