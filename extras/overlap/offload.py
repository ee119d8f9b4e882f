"""Offloaded activations of passes that run beside each other, on two streams.

Copies of both passes are on the same streams. Host memory that a backward pass has read is written
when its stream says so, and in the order in which it was read: the k-th layer of a forward pass
waits for the k-th of the backward pass beside it, which it follows in any case
(`extras.overlap.schedule`). Memory of a pass is freed on its stream.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.memory.offload import OFFLOADERS, HostBuffers, OffloadedGroup, Offloader


class TwoPassOffloader(Offloader):
    """`parallel.memory.offload.Offloader` for a forward pass beside a backward pass."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.host: _SharedBuffers = _SharedBuffers(self)
        self.pass_in_flight: Any = None  # stream of the pass that the copy in flight belongs to

    def send(self, tensors: list[Tensor], number: int) -> OffloadedGroup:
        group = super().send(tensors, number)
        self.pass_in_flight = self.here()
        return group

    def settle(self) -> None:
        """Also of another pass. What a stage received is memory of neither: this one waits, too."""
        if self._in_flight is not None:
            self._wait(self._in_flight.event)
            with self._on(self.pass_in_flight):
                super().settle()

    def here(self) -> Any:
        """The current stream; None on a CPU."""
        return torch.cuda.current_stream() if self._cuda else None

    def note(self) -> Any:
        return self._record(self.here())

    def wait(self, event: Any) -> None:
        self._wait(event)


class _SharedBuffers(HostBuffers):
    """Buffers with the events after which they may be written, in the order of these."""

    def __init__(self, streams: TwoPassOffloader) -> None:
        super().__init__()
        self._streams = streams
        self._read: dict[int, Any] = {}  # by address

    def acquire(self, size: int, pinned: bool) -> Tensor:
        """A buffer that the current stream, which copies, may write."""
        buffer = super().acquire(size, pinned)
        self._streams.wait(self._read.pop(buffer.data_ptr(), None))
        return buffer

    def release(self, buffer: Tensor) -> None:
        """Take a buffer back that the current stream has waited for."""
        super().release(buffer)
        buffers = self.free_by_size[buffer.numel()]
        buffers.insert(0, buffers.pop())  # `acquire` takes the last one
        self._read[buffer.data_ptr()] = self._streams.note()

    def forget_events(self) -> None:
        self._read.clear()


def begin_step(device: torch.device) -> None:
    """Begin a step of passes beside each other, which may be captured in a CUDA graph.

    It waits for no event of the step before, which has ended.
    """
    if not isinstance(found := OFFLOADERS.get(device), TwoPassOffloader):
        OFFLOADERS[device] = found = TwoPassOffloader(device)
    found.host.forget_events()
