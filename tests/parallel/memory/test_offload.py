"""Order in which offloaded tensors are freed and fetched; copies on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.parallel.memory import offload
from phalanx.parallel.memory.offload import OffloadedGroup, Offloader
from phalanx.parallel.memory.recompute import as_bytes, free


def layers(
    offloader: Offloader, count: int, size: int = 100
) -> tuple[list[Tensor], list[OffloadedGroup]]:
    sent = [torch.arange(size) + 1000 * i for i in range(count)]
    return sent, [offloader.send([x, x[:3]], i) for i, x in enumerate(sent)]


def sizes(sent: list[Tensor]) -> list[bool]:
    return [bool(x.untyped_storage().nbytes()) for x in sent]


def test_all_but_the_last_are_freed_and_one_is_prefetched() -> None:
    offloader = Offloader(torch.device("cpu"))
    sent, groups = layers(offloader, 4)
    assert sizes(sent) == [False, False, False, True]
    assert offloader.host.used == 4 * 800
    offloader.need(groups[3])  # has not been freed
    assert sizes(sent) == [False, False, True, True]
    offloader.need(groups[2])
    assert sizes(sent) == [False, True, True, True]
    offloader.need(groups[1])
    offloader.need(groups[0])
    assert all(torch.equal(x, torch.arange(100) + 1000 * i) for i, x in enumerate(sent))
    assert offloader.host.used == 0


def test_the_next_step_takes_the_same_host_memory() -> None:
    offloader = Offloader(torch.device("cpu"))
    for _ in range(3):
        sent, groups = layers(offloader, 3)
        for group in reversed(groups):
            offloader.need(group)
        assert offloader.host.used == 0 and sizes(sent) == [True] * 3
    assert sum(len(memory) for memory in offloader.host._maps) == 3 * 800


def test_micro_batches_of_a_pipeline_return_in_any_order() -> None:
    """The group that was sent first is needed first: no other is prefetched."""
    offloader = Offloader(torch.device("cpu"))
    (a, first), (b, second) = layers(offloader, 2), layers(offloader, 2)
    assert sizes(a) == [False, False] and sizes(b) == [False, True]
    offloader.need(first[1])
    assert sizes(a) == [True, True] and sizes(b) == [False, True]
    offloader.need(first[0])
    assert sizes(b) == [False, True]
    for group in reversed(second):
        offloader.need(group)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and offloader.host.used == 0


def test_a_storage_is_copied_once() -> None:
    offloader = Offloader(torch.device("cpu"))
    x = torch.arange(50)
    group = offloader.send([x, x.view(5, 10), x[::2]], 0)
    assert offloader.host.used == 400
    offloader.settle()
    assert x.untyped_storage().nbytes() == 0
    offloader.need(group)
    assert torch.equal(x, torch.arange(50))


class Stream:
    """What `torch.cuda.Stream` orders: numbers of the copies that the next work comes after."""

    now: "Stream"
    copies = 0

    def __init__(self, _: object = None) -> None:
        self.after = frozenset[int]()

    def copy(self) -> int:
        Stream.copies += 1
        self.after |= {Stream.copies}
        return Stream.copies

    def record_event(self) -> frozenset[int]:
        return self.after

    def wait_event(self, event: frozenset[int]) -> None:
        self.after |= event

    def wait_stream(self, other: "Stream") -> None:
        self.after |= other.after


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    outer, Stream.now = Stream.now, stream
    try:
        yield
    finally:
        Stream.now = outer


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, Stream]:
    """Streams of two passes, in place of CUDA's; copies are numbered."""
    Stream.now, Stream.copies = Stream(), 0
    now = {"Stream": Stream, "stream": on, "current_stream": lambda: Stream.now}
    for name, value in now.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def copied(storage: torch.UntypedStorage) -> Tensor:
        Stream.now.copy()
        return as_bytes(storage)

    monkeypatch.setattr(offload, "as_bytes", copied)
    monkeypatch.setattr(offload, "pin_memory", lambda *_: None)
    monkeypatch.setattr(offload, "_SMALLEST", 1)
    return Stream(), Stream()


def test_passes_beside_each_other_wait_for_what_the_other_one_uses(
    streams: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = streams
    freed = list[tuple[Stream, frozenset[int]]]()

    def noted(storage: torch.UntypedStorage) -> None:
        freed.append((Stream.now, Stream.now.after))
        free(storage)

    monkeypatch.setattr(offload, "free", noted)
    cuda: Any = SimpleNamespace(type="cuda")
    offloader = Offloader(cuda)
    offloader.begin_passes()
    with on(first):  # a forward pass: copies 1 and 2 to the host
        sent, groups = layers(offloader, 2)
        offloader.settle()
        assert freed == [(first, {1}), (first, {1, 2})]
        offloader.need(groups[1])  # its backward pass, on its stream: copies 3 and 4 back
        offloader.need(groups[0])
        assert first.after == {1, 2, 3, 4}
    with on(second):  # beside it the forward pass of another one, to the same host memory
        more, others = layers(offloader, 2)
        assert offloader._out.after >= {3, 4, 5, 6}
    with on(first):  # memory of the pass that has sent it, which the current one waits for as well
        third, (last,) = layers(offloader, 1)
    assert [stream for stream, _ in freed[2:]] == [second, second]
    assert freed[-1][1] >= {6} <= first.after
    with on(second):
        for group in reversed(others):
            offloader.need(group)
    with on(first):
        offloader.need(last)
    values = torch.arange(100)
    assert all(torch.equal(x, values + 1000 * i) for i, x in enumerate(sent))
    assert all(torch.equal(x, values + 1000 * i) for i, x in enumerate(more))
    assert torch.equal(third[0], values) and offloader.host.used == 0
    # A captured step must not wait for events of the one before it.
    first.after = offloader._out.after = offloader._in.after = frozenset()
    offloader.begin_passes()
    with on(first):
        layers(offloader, 1)
    assert len(offloader._out.after) == 1


def test_a_pass_does_not_wait_for_all_that_the_other_one_reads(
    streams: tuple[Stream, Stream],
) -> None:
    """Host memory is taken in the order in which it was read."""
    first, second = streams
    cuda: Any = SimpleNamespace(type="cuda")
    offloader = Offloader(cuda)
    offloader.begin_passes()
    with on(first):
        _, groups = layers(offloader, 3)
        offloader.settle()
        for group in reversed(groups):  # copies 4, 5 and 6
            offloader.need(group)
    with on(second):
        offloader.send([torch.arange(100)], 0)
    assert 4 in offloader._out.after and not {5, 6} & offloader._out.after
