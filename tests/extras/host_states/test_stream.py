"""Jobs that take turns on a device: on a CPU, and in any order that streams and events allow."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from phalanx.extras.host_states import stream as module
from phalanx.extras.host_states.stream import SLOTS, Job, Stream

CPU = torch.device("cpu")


def jobs_of(*sizes: int) -> list[Job]:
    """Jobs of so many bytes, each in two ranges, whose contents all differ."""
    made = []
    for i, size in enumerate(sizes):
        held = (torch.arange(size) + 37 * i).to(torch.uint8)
        made.append(Job([held[: size // 3], held[size // 3 :]]))
    return made


def changed(values: Tensor, number: int) -> Tensor:
    """Bytes after change `number`; no two changes can be swapped, or left out, unnoticed."""
    return values * 3 + number


def rounds(stream: Stream, jobs: list[Job], count: int, change: Callable[..., None]) -> None:
    for number in range(count):
        for job in jobs:
            with stream.on_device(job) as places:
                for place in places:
                    change(place, number)


def after(before: list[list[Tensor]], numbers: range) -> list[list[Tensor]]:
    for number in numbers:
        before = [[changed(r, number) for r in ranges] for ranges in before]
    return before


def contents(jobs: list[Job]) -> list[list[Tensor]]:
    return [[r.clone() for r in job.ranges] for job in jobs]


def equal(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    pairs = zip(chain.from_iterable(a), chain.from_iterable(b), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


SIZES = [
    (1000, 700, 1000, 30, 999, 1000, 1, 1000, 512),
    (100, 200, 300),
    (5,),
    tuple([513] * (SLOTS + 1)),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("room", [0, 3000, 100_000])
def test_rounds_change_all_once(sizes: tuple[int, ...], room: int) -> None:
    jobs = jobs_of(*sizes)
    before = contents(jobs)
    stream = Stream(jobs, CPU, room)
    rounds(stream, jobs, 3, lambda place, n: place.copy_(changed(place, n)))
    stream.settle()
    assert equal(contents(jobs), after(before, range(3)))
    slots, most = SLOTS * max(job.size for job in jobs), sum(job.size for job in jobs)
    assert stream.device_bytes <= min(room + slots, most)


def test_what_settles_may_be_changed_on_the_host() -> None:
    jobs = jobs_of(*SIZES[0])
    stream = Stream(jobs, CPU, 3000)
    stream.settle()  # nothing is anywhere else
    rounds(stream, jobs, 2, lambda place, n: place.copy_(changed(place, n)))
    stream.settle()
    for job in jobs:
        for r in job.ranges:
            r.zero_()
    before = contents(jobs)
    rounds(stream, jobs, 2, lambda place, n: place.copy_(changed(place, n)))
    stream.settle()
    assert equal(contents(jobs), after(before, range(2)))


# --- streams --------------------------------------------------------------------------------------


class Queue:
    """A CUDA stream: work in order, of which nothing is done before it has to."""

    def __init__(self, gpu: "Gpu") -> None:
        self.gpu, self.work = gpu, list[tuple[str, Any]]()
        gpu.queues.append(self)

    def record_event(self) -> list[bool]:
        event = [False]
        self.work.append(("record", event))
        return event

    def wait_event(self, event: list[bool]) -> None:
        self.work.append(("wait", event))

    def wait_stream(self, other: "Queue") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.gpu.run(self)


class Gpu:
    """Queues whose work is done in a random order of those that they allow."""

    def __init__(self, seed: int) -> None:
        self.queues: list[Queue] = []
        self.random = random.Random(seed)
        self.current = Queue(self)

    def run(self, until: Queue) -> None:
        while until.work:
            ready = [
                q for q in self.queues if q.work and (q.work[0][0] != "wait" or q.work[0][1][0])
            ]
            kind, what = self.random.choice(ready).work.pop(0)
            if kind == "record":
                what[0] = True
            elif kind == "call":
                what()

    def queue(self, _: torch.device) -> Queue:
        return Queue(self)

    def current_queue(self) -> Queue:
        return self.current

    def call(self, work: Callable[[], Any]) -> None:
        self.current.work.append(("call", work))

    @contextmanager
    def on(self, queue: Queue | None) -> Iterator[None]:
        before, self.current = self.current, queue or self.current
        yield
        self.current = before


def on_gpu(seed: int, sizes: tuple[int, ...], room: int) -> bool:
    """Whether rounds, with others' reads and writes on the host between them, come out right."""
    gpu, jobs, copy = Gpu(seed), jobs_of(*sizes), module._copy

    def change(place: Tensor, number: int) -> None:
        gpu.call(lambda: place.copy_(changed(place, number)))

    def slot(_: Stream, size: int) -> module.Slot:
        memory = torch.full((size,), 99, dtype=torch.uint8)
        gpu.call(lambda: memory.fill_(7))  # of whoever had it before
        return module.Slot(memory)

    patches = [
        mock.patch.object(torch.cuda, "Stream", gpu.queue),
        mock.patch.object(torch.cuda, "current_stream", gpu.current_queue),
        mock.patch.object(torch.cuda, "stream", gpu.on),
        mock.patch.object(module, "_copy", lambda *to: gpu.call(lambda: copy(*to))),
        mock.patch.object(Stream, "_slot", slot),
    ]
    before = contents(jobs)
    for patch in patches:
        patch.start()
    try:
        stream = Stream(jobs, torch.device("cuda", 0), room)
        rounds(stream, jobs, 3, change)
        stream.settle()
        right = equal(contents(jobs), after(before, range(3)))
        for job in jobs:
            job.ranges[0].fill_(5)
        before = contents(jobs)
        rounds(stream, jobs, 2, change)
        stream.settle()
        return right and equal(contents(jobs), after(before, range(2)))
    finally:
        for patch in patches:
            patch.stop()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("room", [0, 2500])
def test_any_order_that_events_allow_is_right(sizes: tuple[int, ...], room: int) -> None:
    assert all(on_gpu(seed, sizes, room) for seed in range(40))


def _without_slot_events(copy_in: Any) -> Callable[..., None]:
    def at_once(self: Stream, job: Job, slot: module.Slot) -> None:
        slot.free = None
        copy_in(self, job, slot)

    return at_once


def _without_waiting_for_the_stream(work: Any) -> Callable[..., Any]:
    def at_once(*given: Any) -> Any:
        with mock.patch.object(Queue, "wait_stream"):
            return work(*given)

    return at_once


@pytest.mark.parametrize(
    ("method", "without"),
    [
        ("_wait", lambda _: lambda *_: None),
        ("_copy_in", _without_slot_events),
        ("_copy_out", _without_waiting_for_the_stream),
        ("_begin", _without_waiting_for_the_stream),
    ],
)
def test_without_an_event_some_order_is_wrong(method: str, without: Callable[..., Any]) -> None:
    """So the orders that are tried are enough to find what is missing."""
    with mock.patch.object(Stream, method, without(getattr(Stream, method))):
        assert not all(on_gpu(seed, SIZES[0], 0) for seed in range(40))
