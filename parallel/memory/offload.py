"""Activations in host memory between forward and backward pass, copied beside other work.

What a layer gives leaves on a stream of its own while the next layer runs, whose end waits for it
and gives the memory back. When the backward pass comes to a layer, what the layer before it needs
begins to come back. The last layer's is still there when the backward pass begins.

Copies, events and waits are those of streams alone, host memory is pinned, and a step that is
computed again asks for the same buffers: all of it can be captured in a CUDA graph, after an eager
step has made them. On a CPU a copy is a copy.
"""

import mmap
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.cuda._pin_memory_utils import pin_memory

from phalanx.parallel.memory.storages import empty, storages, whole

_SMALLEST = 1 << 16
"""Bytes of a storage that is worth a copy."""


class _HostBuffers:
    """Pinned memory by size, taken and given back. It stays until the process ends: pinning takes
    longer than filling."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self._maps: list[mmap.mmap] = []
        self.used = 0
        """Bytes that are taken."""

    def take(self, size: int, pinned: bool) -> Tensor:
        """uint8 [size]."""
        self.used += size
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        # Not torch's pinned memory: that comes in powers of two, and keeps account of its use by
        # events, which a capture must not ask for.
        memory = mmap.mmap(-1, size)
        self._maps.append(memory)
        made = torch.frombuffer(memory, dtype=torch.uint8)
        if pinned:
            pin_memory(made.data_ptr(), len(memory))
        return made

    def give(self, buffer: Tensor) -> None:
        self.used -= buffer.numel()
        self._free[buffer.numel()].append(buffer)


class OffloadedGroup:
    """What one layer has given."""

    def __init__(self, place: int, before: "Group | None") -> None:
        self.place, self.before = place, before
        """`before` is going to be needed next."""
        self.pairs: list[tuple[UntypedStorage, Tensor]] = []
        """With host memory of its size."""
        self.away = False
        """The memory of the storages has been given back."""
        self.event: Any = None
        """Of the last copy, out or in."""


class Offloader:
    """Of a device.

    Args:
        device: where activations are.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._out: Any = torch.cuda.Stream(device) if self._cuda else None
        self._in: Any = torch.cuda.Stream(device) if self._cuda else None
        self.host = _HostBuffers()
        self._last: OffloadedGroup | None = None
        self._leaving: OffloadedGroup | None = None

    def send(self, tensors: list[Tensor], place: int) -> OffloadedGroup:
        """Tensors begin to leave, and those that left before are away.

        Nobody reads them before `need`.

        Args:
            tensors: with storages of which nobody else needs a part.
            place: the number of the layer.
        """
        given = [s for s in storages(tensors) if s.nbytes() >= _SMALLEST or not self._cuda]
        last = self._last
        group = OffloadedGroup(
            place, last if last is not None and last.place + 1 == place else None
        )
        self._start(self._out)
        with self._on(self._out):
            for storage in given:
                host = self.host.take(storage.nbytes(), self._cuda)
                host.copy_(whole(storage), non_blocking=True)
                group.pairs.append((storage, host))
        group.event = self._mark(self._out)
        self.settle()
        self._leaving = self._last = group
        return group

    def settle(self) -> None:
        """What is leaving is away, and its memory free."""
        group, self._leaving = self._leaving, None
        if group is not None:
            self._wait(group.event)
            for storage, _ in group.pairs:
                empty(storage)
            group.away = True

    def need(self, group: OffloadedGroup) -> None:
        """All of a group is there again; the group before it begins to come."""
        if group is self._leaving:  # it stays
            self._leaving = None
        if group is self._last:
            self._last = None
        if group.away:
            self._fetch(group)
        self._wait(group.event)
        for _, host in group.pairs:
            self.host.give(host)
        before, group.before, group.pairs, group.event = group.before, None, [], None
        if before is not None and before.away:
            self._fetch(before)

    def _fetch(self, group: OffloadedGroup) -> None:
        for storage, host in group.pairs:
            storage.resize_(host.numel())  # on the stream that is going to use it
        self._start(self._in)
        with self._on(self._in):
            for storage, host in group.pairs:
                whole(storage).copy_(host, non_blocking=True)
        group.event, group.away = self._mark(self._in), False

    def _start(self, stream: Any) -> None:
        if self._cuda:
            stream.wait_stream(torch.cuda.current_stream())

    def _on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream if self._cuda else None)

    def _mark(self, stream: Any) -> Any:
        return stream.record_event() if self._cuda else None

    def _wait(self, event: Any) -> None:
        if self._cuda and event is not None:
            torch.cuda.current_stream().wait_event(event)

    def abandon(self) -> None:
        """Forget what a step that ended in an error has sent; its host memory is not used again."""
        self._leaving = self._last = None


_OFFLOADERS: dict[torch.device, Offloader] = {}


def offloader(device: torch.device) -> Offloader:
    """That of a device, made at its first use."""
    if device not in _OFFLOADERS:
        _OFFLOADERS[device] = Offloader(device)
    return _OFFLOADERS[device]
