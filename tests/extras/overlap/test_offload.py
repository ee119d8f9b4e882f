"""Offloaded activations of passes beside each other: what copies and memory wait for."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.extras.overlap.offload import TwoPassOffloader, begin_step
from phalanx.parallel.memory import offload
from phalanx.parallel.memory.recompute import as_bytes, free
from tests.parallel.memory.test_offload import layers

CUDA: Any = SimpleNamespace(type="cuda")


class Stream:
    """Stand-in for `torch.cuda.Stream`: numbers of the copies that its next work comes after."""

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
    offloader = TwoPassOffloader(CUDA)
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
    offloader.host.forget_events()
    with on(first):
        layers(offloader, 1)
    assert len(offloader._out.after) == 1


def test_a_pass_does_not_wait_for_all_that_the_other_one_reads(
    streams: tuple[Stream, Stream],
) -> None:
    """Host memory is taken in the order in which it was read."""
    first, second = streams
    offloader = TwoPassOffloader(CUDA)
    with on(first):
        _, groups = layers(offloader, 3)
        offloader.settle()
        for group in reversed(groups):  # copies 4, 5 and 6
            offloader.need(group)
    with on(second):
        offloader.send([torch.arange(100)], 0)
    assert 4 in offloader._out.after and not {5, 6} & offloader._out.after


def test_a_step_takes_the_offloader_of_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(offload, "OFFLOADERS", found := {})
    monkeypatch.setattr("phalanx.extras.overlap.offload.OFFLOADERS", found)
    in_turn = offload.offloader(cpu)
    begin_step(cpu)
    beside = offload.offloader(cpu)
    begin_step(cpu)
    assert isinstance(beside, TwoPassOffloader) and beside is not in_turn
    assert offload.offloader(cpu) is beside
