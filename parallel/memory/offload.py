"""Activations in host memory between forward and backward pass; copies overlap other work.

The tensors of a layer are copied out on a stream of their own while the next layer runs, whose end
waits for the copy and frees their memory. When the backward pass reaches a layer, the copies back
of the layer before it start. The last layer's tensors are still on the device then.

Copies, events and waits are all on streams, and a repeated step asks for the same pinned buffers:
all of it can be captured in a CUDA graph, after an eager step. On a CPU a copy is synchronous.
"""

import mmap
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.cuda._pin_memory_utils import pin_memory

from phalanx.parallel.memory.recompute import as_bytes, free, storages

_SMALLEST = 1 << 16  # bytes of a storage that is worth a copy


class HostBuffers:
    """Pool of pinned buffers by size, kept until the process ends: pinning is slow."""

    def __init__(self) -> None:
        self.free_by_size: dict[int, list[Tensor]] = {}
        self._maps: list[mmap.mmap] = []
        self.used = 0  # bytes

    def acquire(self, size: int, pinned: bool) -> Tensor:
        self.used += size
        free_buffers = self.free_by_size.setdefault(size, [])
        if free_buffers:
            return free_buffers.pop()
        # Not torch's pinned memory: that comes in powers of two, and keeps account of its use by
        # events, which a capture must not ask for.
        memory = mmap.mmap(-1, size)
        self._maps.append(memory)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned:
            pin_memory(buffer.data_ptr(), len(memory))
        return buffer

    def release(self, buffer: Tensor) -> None:
        self.used -= buffer.numel()
        self.free_by_size[buffer.numel()].append(buffer)


class OffloadedGroup:
    """Offloaded storages of one layer."""

    def __init__(self, number: int, previous: "OffloadedGroup | None") -> None:
        self.number = number
        self.previous = previous  # of the layer before, which the backward pass needs next
        self.pairs: list[tuple[UntypedStorage, Tensor]] = []  # storages and host buffers
        self.freed = False  # the device memory of the storages is
        self.event: Any = None  # after the last copy, out or in


class Offloader:
    """Copies between a device and host memory."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if self._cuda else None
        self._in: Any = torch.cuda.Stream(device) if self._cuda else None
        self.host = HostBuffers()
        self._last: OffloadedGroup | None = None
        self._in_flight: OffloadedGroup | None = None

    def send(self, tensors: list[Tensor], number: int) -> OffloadedGroup:
        """Start copies of tensors to the host, and free those that were sent before.

        Nobody reads the tensors before `need`, or needs another part of their storages.
        """
        sent = [s for s in storages(tensors) if s.nbytes() >= _SMALLEST or not self._cuda]
        last = self._last
        follows = last is not None and last.number + 1 == number
        group = OffloadedGroup(number, last if follows else None)
        self._start(self._out)
        with self._on(self._out):
            for storage in sent:
                host = self.host.acquire(storage.nbytes(), self._cuda)
                host.copy_(as_bytes(storage), non_blocking=True)
                group.pairs.append((storage, host))
        group.event = self._record(self._out)
        self.settle()
        self._in_flight = self._last = group
        return group

    def settle(self) -> None:
        """Wait for the copy in flight and free what it has copied."""
        group, self._in_flight = self._in_flight, None
        if group is not None:
            self._wait(group.event)
            for storage, _ in group.pairs:
                free(storage)
            group.freed = True

    def need(self, group: OffloadedGroup) -> None:
        """Make a group readable, and start the copies back of the previous group."""
        if group is self._in_flight:  # it need not be freed any more
            self._in_flight = None
        if group is self._last:
            self._last = None
        if group.freed:
            self._fetch(group)
        self._wait(group.event)
        for _, host in group.pairs:
            self.host.release(host)
        previous, group.previous, group.pairs, group.event = group.previous, None, [], None
        if previous is not None and previous.freed:
            self._fetch(previous)

    def _fetch(self, group: OffloadedGroup) -> None:
        for storage, host in group.pairs:
            storage.resize_(host.numel())  # on the stream that is going to use it
        self._start(self._in)
        with self._on(self._in):
            for storage, host in group.pairs:
                as_bytes(storage).copy_(host, non_blocking=True)
        group.event, group.freed = self._record(self._in), False

    def _start(self, stream: Any) -> None:
        if self._cuda:
            stream.wait_stream(torch.cuda.current_stream())

    def _on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream if self._cuda else None)

    def _record(self, stream: Any) -> Any:
        return stream.record_event() if self._cuda else None

    def _wait(self, event: Any) -> None:
        if self._cuda and event is not None:
            torch.cuda.current_stream().wait_event(event)

    def abandon(self) -> None:
        """Forget what a failed step has sent; its host memory is not used any more."""
        self._in_flight = self._last = None


OFFLOADERS: dict[torch.device, Offloader] = {}


def offloader(device: torch.device) -> Offloader:
    """Offloader of a device, created at its first use."""
    if device not in OFFLOADERS:
        OFFLOADERS[device] = Offloader(device)
    return OFFLOADERS[device]
