"""Tapes of launches, here by stand-ins that read and write the addresses that they are given."""

import ctypes
import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.kernels import tape as tape_module
from phalanx.kernels.tape import Span, Tape, Tapes, arrange
from phalanx.kernels.tracing import recorder


def at(address: int, count: int) -> np.ndarray:
    """Values at an address, as a kernel sees them: no operator of torch takes part."""
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


def launch(out: Tensor, x: Tensor, y: Tensor | None, factor: int) -> None:
    """out = factor * (x + y), as a kernel does it."""
    count = out.numel()

    def call(values: list[Any]) -> None:
        total = at(values[1], count) + (at(values[2], count) if values[2] else 0)
        at(values[0], count)[:] = values[3] * total

    recording = recorder()
    call([out.data_ptr(), x.data_ptr(), 0 if y is None else y.data_ptr(), factor])
    if recording:
        recording.launched(call, [out, x, y, factor], [0, 1, 2])


COUNTER = torch.full((4,), 100.0)


def layer(x: Tensor, y: Tensor | None, *, factor: int) -> list[Tensor | None]:
    """Scratch, a view at an offset, a constant, an operator, one in place, and results."""
    scratch = x.new_empty(2, 4)
    launch(scratch[1], x, y, factor)
    scratch[0].fill_(0.5)
    both = x.new_empty(4)
    launch(both, scratch[0], scratch[1], 1)
    del scratch
    doubled = both.clamp(max=1e6) * 2
    out = torch.empty_like(x)
    launch(out, doubled, COUNTER, 1)
    return [out.view(2, 2), both, None, x, x.new_empty(0)]


def expected(x: Tensor, y: Tensor | None, factor: int) -> tuple[Tensor, Tensor]:
    both = 0.5 + factor * (x + (0 if y is None else y))
    return (2 * both + 100).view(2, 2), both


@pytest.mark.parametrize("given", [True, False])
def test_replays_have_the_values_of_calls(given: bool) -> None:
    tapes, kept = Tapes(layer), []
    for _ in range(6):
        x, y = torch.randn(4), torch.randn(4) if given else None
        out, both, none, same, empty = tapes([x, y], factor=3)
        for got, want in zip((out, both), expected(x, y, 3), strict=True):
            torch.testing.assert_close(got, want)
        assert none is None and same is x and empty.shape == (0,)
        kept.append((out, out.clone()))
    assert all(torch.equal(result, copy) for result, copy in kept), "results are not shared"
    assert [type(tape) for tape in tapes._tapes.values()] == [Tape]


def test_inputs_that_are_views_of_one_tensor() -> None:
    """As parameters of a flat buffer: where they lie in it may differ between calls."""
    tapes = Tapes(layer)
    for first, second in ((0, 4), (0, 4), (4, 0), (2, 8)):
        flat = torch.randn(12)
        x, y = flat[first : first + 4], flat[second : second + 4]
        torch.testing.assert_close(tapes([x, y], factor=1)[0], expected(x, y, 1)[0])


def test_equal_inputs_are_not_taken_for_one() -> None:
    tapes = Tapes(layer)
    x = torch.randn(4)
    for _ in range(3):
        torch.testing.assert_close(tapes([x, x], factor=1)[0], expected(x, x, 1)[0])
    for _ in range(3):
        y = torch.randn(4)
        torch.testing.assert_close(tapes([x, y], factor=1)[0], expected(x, y, 1)[0])


def test_another_shape_or_keyword_has_another_tape() -> None:
    tapes = Tapes(layer)
    for factor in (1, 2, 1, 2, 1, 2):
        x, y = torch.randn(4), torch.randn(4)
        torch.testing.assert_close(tapes([x, y], factor=factor)[0], expected(x, y, factor)[0])
    assert len(tapes._tapes) == 2


def test_memory_is_freed_after_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a piece for small scratch, of which the next test knows."""
    monkeypatch.setattr(tape_module, "_SMALL", 0)
    tapes = Tapes(layer)
    for _ in range(2):
        tapes([torch.randn(4), None], factor=1)
    (tape,) = tapes._tapes.values()
    assert isinstance(tape, Tape) and not tape.piece.size
    alive: list[Any] = [torch.randn(4), None, *tape._more]
    addresses = [alive[0].data_ptr(), 0] + [0] * len(tape._more)
    counts = []
    for step in tape._steps:
        step(addresses, alive)
        counts.append(sum(t is not None for t in alive[2:]))
    assert max(counts) == 3
    assert counts[-1] == 2, "of the buffers the two results are left"


def test_scratch_that_is_in_use_together_lies_apart() -> None:
    generator = random.Random(0)
    for _ in range(50):
        spans = []
        for number in range(12):
            first = generator.randrange(20)
            spans.append(
                Span(number, generator.randrange(1, 5000), first, first + generator.randrange(1, 8))
            )
        places, size = arrange(spans)
        assert all(begin % 512 == 0 for begin in places.values())
        assert max(places[s.number] + s.size for s in spans) == size
        for one, other in itertools.combinations(spans, 2):
            if one.first < other.end and other.first < one.end:
                begin, after = sorted((places[s.number], s.size) for s in (one, other))
                assert begin[0] + begin[1] <= after[0]
        most = max(sum(s.size for s in spans if s.first <= at < s.end) for at in range(28))
        assert most <= size <= 2 * most + 12 * 512


def test_scratch_takes_one_allocation() -> None:
    def chain(x: Tensor) -> list[Tensor]:
        for _ in range(5):
            y = x.new_empty(4)
            launch(y, x, None, 2)
            x = y
        return [x]

    tapes = Tapes(chain)
    for _ in range(4):
        x = torch.randn(4)
        torch.testing.assert_close(tapes([x])[0], 32 * x)
    (tape,) = tapes._tapes.values()
    assert isinstance(tape, Tape)
    assert len(tape.piece.places) == 4 and tape.piece.size == 512 + 16, "two are in use at a time"


def test_a_function_that_reads_values_is_called_each_time() -> None:
    def reading(x: Tensor) -> list[Tensor]:
        return [x * 2 if x[0].item() > 0 else x * 3]

    tapes = Tapes(reading)
    for first in (1.0, 1.0, 1.0, -1.0):
        x = torch.full((2,), first)
        assert torch.equal(tapes([x])[0], x * (2 if first > 0 else 3))


def test_threads_do_not_record_each_other() -> None:
    import threading

    seen: list[Any] = []

    def outer(x: Tensor) -> list[Tensor]:
        thread = threading.Thread(target=lambda: seen.append(recorder()))
        thread.start()
        thread.join()
        seen.append(recorder())
        return [x.clone()]

    tapes = Tapes(outer)
    for _ in range(3):
        tapes([torch.randn(2)])
    assert seen[0] is None and seen[1] is None and seen[2] is None and seen[3] is not None
    assert len(seen) == 4 and recorder() is None
