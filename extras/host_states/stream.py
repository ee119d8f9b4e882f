"""Bytes in host memory that take turns on a device, where they are changed.

Jobs come in the same order again and again. While one is changed, those after it are copied to the
device and those before it back, each direction on a stream of its own:

    stream of the update   |  wait for j  |  change j   |  wait for j+1  |  change j+1  |
    to the device          |  j+2, once j-2 is back     |  j+3, once j-1 is back        |
    to the host            |  j-1                       |  j, once it is changed        |

The first jobs of the next round are copied at the end of a round, beside whatever follows. Jobs
that find room on the device stay there, and are copied to the host when it reads them (`settle`).

A slot is memory of the device that one job after another has. Nothing else ever uses it, so that
events alone order its uses: a copy into it waits for the copy out of it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGN = 512  # bytes; whole cache lines, and any dtype
SLOTS = 4
"""Slots of the jobs that take turns: one is changed, one copied in, one out; one more for jobs of
different sizes."""
ELEMENTS = 32 << 20
"""Elements of a parameter in a job: 192 MiB of two moments and a remainder in 16 bits each."""


def aligned(size: int) -> int:
    """Bytes from the beginning of a tensor to that of the next, on the host and on the device."""
    return -(-size // _ALIGN) * _ALIGN


@dataclass(eq=False)
class Slot:
    """Memory on the device, for one job at a time."""

    memory: Tensor  # uint8
    free: Any = None  # event after the last copy out of it


@dataclass(eq=False)
class Job:
    """Ranges of host memory that are changed at a time, uint8."""

    ranges: list[Tensor]
    slot: Slot | None = None  # where it is on the device, or is copied to
    stays: bool = False  # on the device, in a slot of its own
    loaded: Any = None  # event after the copy to the device

    @property
    def size(self) -> int:
        """Bytes on the device."""
        return sum(aligned(r.numel()) for r in self.ranges)

    def on(self, slot: Slot) -> list[Tensor]:
        """Places of the ranges in a slot."""
        found, begin = [], 0
        for r in self.ranges:
            found.append(slot.memory[begin : begin + r.numel()])
            begin += aligned(r.numel())
        return found


class Stream:
    """Copies of jobs between host memory and a device, in rounds.

    Args:
        jobs: in the order in which every round changes them.
        device: where they are changed. On a CPU all copies are synchronous.
        room: bytes on the device for jobs that stay there, beside the slots.
    """

    def __init__(self, jobs: Sequence[Job], device: torch.device, room: int = 0) -> None:
        self._jobs, self._device = list(jobs), device
        self._cuda = device.type == "cuda"
        self._in: Any = torch.cuda.Stream(device) if self._cuda else None
        self._out: Any = torch.cuda.Stream(device) if self._cuda else None
        sizes = [job.size for job in jobs]
        if sum(sizes) <= SLOTS * max(sizes, default=0):
            room = sum(sizes)  # which is less than slots would take
        for job in self._jobs:
            if job.size > room:
                break
            room -= job.size
            job.stays, job.slot = True, self._slot(job.size)
        self._turns = [job for job in self._jobs if not job.stays]
        largest = max((job.size for job in self._turns), default=0)
        self._slots = [self._slot(largest) for _ in self._turns[:SLOTS]]
        self._next = 0  # in `_turns`, of the next to be copied to the device
        self._begun = False  # the jobs that stay are on the device, and the first of the others

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots."""
        kept = sum(job.size for job in self._jobs if job.stays)
        return kept + sum(slot.memory.numel() for slot in self._slots)

    def _slot(self, size: int) -> Slot:
        return Slot(torch.empty(size, dtype=torch.uint8, device=self._device))

    @contextmanager
    def on_device(self, job: Job) -> Iterator[list[Tensor]]:
        """Inside, a job's ranges are on the device, to be changed on the current stream.

        Called for every job in order; after the last comes the first.
        """
        if not self._begun:
            self._begin()
        assert job.slot is not None, "jobs come in order"
        self._wait(job.loaded)
        yield job.on(job.slot)
        if not job.stays:
            slot, job.slot = job.slot, None
            slot.free = self._copy_out(job, slot)
            self._load_next(slot)

    def settle(self) -> None:
        """Have host memory hold what it would if nothing were ever on the device.

        It may be changed then: the next round copies everything anew.
        """
        if not self._begun:
            return
        for job in self._jobs:
            if job.stays and job.slot is not None:
                self._copy_out(job, job.slot)
        if self._cuda:
            self._in.synchronize()
            self._out.synchronize()
        self._begun = False

    def _begin(self) -> None:
        if self._cuda:  # the allocator gave slots that the current stream may still use otherwise
            self._in.wait_stream(torch.cuda.current_stream())
        for job in self._jobs:
            if job.stays and job.slot is not None:
                self._copy_in(job, job.slot)
            else:
                job.slot = None
        self._next, self._begun = 0, True
        for slot in self._slots:
            self._load_next(slot)

    def _load_next(self, slot: Slot) -> None:
        """Copy the next job to a slot, which is its own when what was there is back."""
        job = self._turns[self._next]
        self._next = (self._next + 1) % len(self._turns)
        job.slot = slot
        self._copy_in(job, slot)

    def _copy_in(self, job: Job, slot: Slot) -> None:
        if self._cuda and slot.free is not None:
            # Streams keep their order, so that the job's own last copy to the host, before that of
            # the slot, is over too.
            self._in.wait_event(slot.free)
        with torch.cuda.stream(self._in):
            _copy(job.on(slot), job.ranges)
            job.loaded = self._in.record_event() if self._cuda else None

    def _copy_out(self, job: Job, slot: Slot) -> Any:
        """The event after the copy, which waits for what the current stream has done so far."""
        if self._cuda:
            self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._out):
            _copy(job.ranges, job.on(slot))
            return self._out.record_event() if self._cuda else None

    def _wait(self, event: Any) -> None:
        if self._cuda and event is not None:
            torch.cuda.current_stream().wait_event(event)


def _copy(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    for into, values in zip(to, source, strict=True):
        into.copy_(values, non_blocking=True)
