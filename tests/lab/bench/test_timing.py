"""The framework of the benchmarks: statistics, rounds, cases, and ranks that measure together."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.scripts.lab.bench import timing
from phalanx.scripts.lab.bench.clocks import Cpu
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import Bars
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, passes
from tests.support.distributed import run_distributed


class CountingCpu(Cpu):
    """A CPU clock that counts flushes and fails captures of `broken` calls."""

    def __init__(self) -> None:
        self.flushes = 0

    def flush(self) -> None:
        self.flushes += 1


class Capturing(Cpu):
    """A CPU clock whose captures of calls fail if `broken`."""

    broken = False

    def capture(self, call: Any) -> Any:
        if self.broken:
            raise RuntimeError("a graph is too small")
        return call


def timings_with(times: dict[tuple[str, str], list[float]]) -> Timings:
    """Timings of ranks whose calls have taken these milliseconds in every round."""
    timings = Bench(Cpu(), 3).timings("layer", (1,))
    ranks = len(next(iter(times.values())))
    timings.of_ranks = [
        {(*key, "eager"): [values[rank]] * 3 for key, values in times.items()}
        for rank in range(ranks)
    ]
    return timings


def test_statistics() -> None:
    values = [float(v) for v in range(11)]
    assert timing.time_of(values) == (5, 1, 9)
    assert timing.time_of([3.0]) == (3, 3, 3)
    assert timing.time_of([5.0, 7, 9], [1.0, 2, 3]) == (5, pytest.approx(4.2), 5.8)


def test_rounds_are_interleaved_with_the_cache_flushed() -> None:
    """The order differs between rounds and is the same in every run, as on every rank."""
    bench, order = Bench(CountingCpu(), 2), list[str]()
    timings = bench.timings("mlp", (1,))
    for name in "ab":
        timings.add(Case(name, "forward", lambda name=name: order.append(name)))
    timings.add(Case("c", "forward", lambda: 1 / 0))
    timings.run()
    rounds = ["".join(order[i : i + 2]) for i in range(2, 12, 2)]
    assert len(order) == 12 and bench.clock.flushes == 10
    assert {"".join(sorted(r)) for r in rounds} == {"ab"} and len({*rounds}) == 2
    first = order.copy()
    order.clear()
    timings.run()
    assert order == first[2:]
    assert len(timings.of_ranks[0]["a", "forward", "eager"]) == 2
    (skipped,) = timings.skipped
    assert skipped.failed and "division by zero" in skipped.note


def test_warm_up_rounds_are_not_counted() -> None:
    calls = list[int]()
    timings = Bench(Cpu(), 2, warm=0.02).timings("mlp", (1,))
    timings.add(Case("ours", "forward", lambda: calls.append(1)))
    timings.run()
    (times,) = timings.of_ranks[0].values()
    assert len(times) == 2 and len(calls) > 1 + timing.WARM_ROUNDS + 2


def test_a_capture_that_fails_is_our_failure_and_not_a_peers() -> None:
    bench = Bench(Capturing(), 1)
    bench.clock.broken = True
    timings = bench.timings("mlp", (1,))
    for side in ("ours", "peer"):
        for mode in ("eager", "graph"):
            timings.add(Case(side, "forward", lambda: None, mode=mode, ours=side == "ours"))
    assert [(r.side, r.mode, r.failed) for r in timings.skipped] == [
        ("ours", "graph", True),
        ("peer", "graph", False),
    ]
    assert "no capture: RuntimeError: a graph is too small" in timings.skipped[0].note
    timings.run()
    assert {mode for _, _, mode in timings.of_ranks[0]} == {"eager"}


def test_records_of_cases() -> None:
    """Backward is the difference of both passes; ratios are to the fastest other side."""
    timings = timings_with(
        {
            ("a", "forward"): [1.0],
            ("a", "both"): [5.0],
            ("b", "forward"): [2.0],
            ("c", "forward"): [3.0],
            ("b", "both"): [7.0],
            ("d", "both"): [4.0],
        }
    )
    bars = Bars((1.5, 1.2), (3.0, 4.0))
    options = dict(against=("b", "c"), note="why")
    forward, backward = passes("a", lambda: 0, lambda: 0, 2e9, bars, **options)
    (record,) = timings.record(forward)
    assert (record.ms, record.ratio, record.tflops, record.note) == (1.0, 2.0, 2.0, "why")
    assert (record.bar, record.goal, record.verdict) == (1.5, 3.0, "met")
    (record,) = timings.record(backward)
    assert (record.pass_name, record.ms, record.ratio, record.tflops) == ("backward", 4, 1.25, 1.0)
    (record,) = timings.record(Case("d", "both", report="backward", forward_of="a"))
    assert record.ms == 3.0 and record.ranks == ()
    (record,) = timings.record(Case("a", "forward", against=2.5, bars=(1.0, None)))
    assert record.ratio == 2.5 and record.goal is None
    (record,) = timings.record(Case("a", "forward", against="none", bars=(1.0, None)))
    assert record.ratio is None and record.bar is None
    assert timings.record(Case("e", "forward")) == []


def test_records_are_in_order_of_modes_and_passes() -> None:
    sides = [c for side in "ab" for c in passes(side, lambda: 0, lambda: 0)]
    cases = [replace(c, mode=mode) for mode in ("graph", "eager") for c in sides]
    made = Bench(Cpu(), 1).timings("mlp", (1,)).measure(cases)
    found = ["".join((r.mode[0], r.side, r.pass_name[0])) for r in made]
    assert found == ["gaf", "gbf", "gab", "gbb", "eaf", "ebf", "eab", "ebb"]


def test_an_error_is_a_record() -> None:
    def suite() -> list[Record]:
        raise ValueError("no such memory")

    (record,) = Bench(Cpu(), 1).attempt(suite, "plan", (1,))
    assert record.failed and record.note == "ValueError: no such memory"


def _on_ranks() -> tuple[Any, ...]:
    bench, rank = Bench(Cpu(), 3), dist.get_rank()
    timings = bench.timings("layer", (1,))

    def fails() -> None:
        if rank == 1:
            raise ValueError("no such memory")

    slow = Case("a", "forward", lambda: time.sleep(0.002 + 0.01 * rank))
    wrong = Case("c", "forward", lambda: rank, check=lambda r: "wrong bits in out" if r else "")
    records = timings.measure([slow, Case("b", "forward", fails), wrong])
    raised = bench.attempt(lambda: [] if rank == 0 else fails() or [], "plan", (1,))
    return records, raised, [side for side, _, _ in timings.of_ranks[rank]]


@pytest.mark.dist
def test_the_slowest_rank_counts_and_a_failure_of_one_skips_the_call_on_all() -> None:
    for (record, *skipped), raised, sides in run_distributed(_on_ranks, 2):
        assert record.ms == pytest.approx(record.ranks[1], abs=1e-3) and record.ms >= 12
        assert 2 <= record.ranks[0] < record.ranks[1]
        assert sides == ["a"]
        assert [(r.side, r.failed, r.note) for r in skipped] == [
            ("b", True, "rank 1: ValueError: no such memory"),
            ("c", True, "rank 1: wrong bits in out"),
        ]
        assert [r.note for r in raised] == ["rank 1: ValueError: no such memory"]
