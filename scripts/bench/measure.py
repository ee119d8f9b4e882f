"""Medians of interleaved rounds on one GPU, the L2 cache flushed before every run.

A round runs every side once, beginning with another one each time, so that a falling clock meets
all of them. Rounds before those that count warm up, for `Bench.warm` seconds if they are to find
the clocks and the power of a long run. The host waits only in the end: an eager side whose launches
keep ahead of the GPU is not charged for them.
"""

import contextlib
import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median
from time import monotonic
from typing import Any, NamedTuple, Protocol

import torch

from phalanx.scripts.bench.records import Record
from phalanx.scripts.bench.shapes import Shape

Call = Callable[[], object]
FLUSH_BYTES = 256 * 2**20
WARM_ROUNDS = 3
_HEAD_START_CYCLES = 60_000
"""By which company is ahead; about 30 us."""


class Clock(Protocol):
    """A device, as far as measuring needs it."""

    device: torch.device

    def flush(self) -> None:
        """Put something else in the L2 cache."""

    def stamp(self) -> Any:
        """The time on the current stream, once it gets there."""

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds, after `wait`."""

    def wait(self) -> None: ...

    def capture(self, call: Call) -> Call:
        """Replays of a CUDA graph of the call."""

    def free(self) -> None:
        """Return unused memory."""


class Gpu:
    """The current CUDA device as a `Clock`."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._other = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self._side = torch.cuda.Stream()  # one for all captures, as memory is kept for each stream
        self._how: dict[str, Any] = {}  # of captures, for torch.cuda.graph

    def meet(self) -> None:
        """Before a call, a capture and a replay: where ranks that measure together begin."""

    def flush(self) -> None:
        self._other.zero_()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def capture(self, call: Call) -> Call:
        self.meet()
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            call()
        torch.cuda.current_stream().wait_stream(self._side)
        torch.cuda.synchronize()
        self.meet()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, **self._how):
                call()
        except Exception:
            torch.cuda.set_stream(before)
            self._recover()
            self.meet()  # as ranks do that can replay theirs
            raise
        self.meet()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def _recover(self) -> None:
        """Capture something harmless: a capture that failed leaves torch's generators captured."""
        with contextlib.suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph()):
            self._other[:1].zero_()

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class Company(Protocol):
    """What runs beside a side while it is measured."""

    @property
    def gigabytes_per_second(self) -> float:
        """Of the copies alone, read and written."""

    def shortest_lead(self) -> float:
        """Least milliseconds by which they outlasted a run; negative if once they did not."""

    def start(self) -> None: ...

    def join(self, end: Any) -> None:
        """Called after the side's end was stamped."""


class Launches:
    """The part of a `Company` that launches on a stream of its own and sees when that has ended."""

    gigabytes_per_second = 0.0

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._ends: list[tuple[Any, Any]] = []

    def launch(self) -> None:
        """What runs beside a side, from before it begins until after its end."""
        raise NotImplementedError

    def start(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self.launch()
            self._end = torch.cuda.Event(enable_timing=True)
            self._end.record()
        torch.cuda._sleep(_HEAD_START_CYCLES)

    def join(self, end: Any) -> None:
        self._ends.append((end, self._end))
        torch.cuda.current_stream().wait_event(self._end)

    def shortest_lead(self) -> float:
        return min(end.elapsed_time(later) for end, later in self._ends)

    def trial(self) -> float:
        """Milliseconds of the second of two launches, alone."""
        with torch.cuda.stream(self._stream):
            self.launch()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.launch()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end)


class Time(NamedTuple):
    ms: float
    p10: float
    p90: float


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolated between the two nearest of the sorted values."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def time_of(values: Sequence[float]) -> Time:
    return Time(median(values), percentile(values, 0.1), percentile(values, 0.9))


def backward_time(both: Sequence[float], forward: Sequence[float]) -> Time:
    """Forward and backward less forward: difference of medians, spread of the rounds' differences.

    Round i of the one is set against round i of the other.
    """
    differences = [b - f for b, f in zip(both, forward, strict=True)]
    ms = median(both) - median(forward)
    return Time(ms, percentile(differences, 0.1), percentile(differences, 0.9))


def reason(error: BaseException) -> str:
    """An error in one line, without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return f"{type(error).__name__}: {' '.join(text.split())}"[:200]


class Key(NamedTuple):
    side: str
    what: str
    mode: str = "graph"


@dataclass
class Bench:
    """What every suite is given."""

    clock: Clock
    rounds: int
    peers: tuple[str, ...] = ()
    """Of `torch`, `te`, `sonic`: those to compare with."""
    demanded: bool = False
    """Peers were named one by one, so one that is missing is an error."""
    backend: str = "fused"
    shapes: Mapping[str, Sequence[Shape]] = field(default_factory=dict)
    """All shapes that each suite will see."""
    warm: float = 0.0
    """Seconds of rounds that do not count, before the others."""

    def sides(self, suite: str, shape: Shape) -> "Sides":
        return Sides(self, suite, shape)


class Sides:
    """What is compared on a shape; what cannot run becomes a record with the reason."""

    def __init__(self, bench: Bench, suite: str, shape: Shape) -> None:
        self.bench, self.suite, self.shape = bench, suite, shape
        self.lost: list[Record] = []
        self.times: dict[Key, list[float]] = {}
        self._calls: dict[Key, tuple[Call, Company | None]] = {}

    def add(
        self,
        side: str,
        what: str,
        call: Call,
        *,
        modes: Sequence[str] = ("graph",),
        ours: bool = True,
        company: Company | None = None,
    ) -> None:
        """Run a side once, capture it if so wanted, and take part with it.

        Args:
            modes: `eager`, `graph`.
            ours: it is a failure if it cannot run; a peer only has to run eagerly.
            company: what runs beside it.
        """
        clock = self.bench.clock
        try:
            call()
            clock.wait()
        except Exception as error:
            self.lose(side, what, modes[0], reason(error), failed=True)
            return
        for mode in modes:
            try:
                ready = clock.capture(call) if mode == "graph" else call
            except Exception as error:
                why = f"no capture: {reason(error)}"
                self.lose(side, what, mode, why, failed=ours)
                continue
            self._calls[Key(side, what, mode)] = ready, company

    def lose(self, side: str, what: str, mode: str, why: str, *, failed: bool) -> None:
        """Note why there will be no result."""
        self.lost.append(Record(self.suite, self.shape, side, what, mode, note=why, failed=failed))

    def run(self) -> None:
        """Measure all sides: milliseconds of each round, in the order of the rounds."""
        clock, keys = self.bench.clock, list(self._calls)
        stamps: dict[Key, list[tuple[Any, Any]]] = {key: [] for key in keys}
        for round_ in range(WARM_ROUNDS):
            self._round(round_)
        until = monotonic() + self.bench.warm
        while keys and monotonic() < until:
            self._round(0)
            clock.wait()
        for round_ in range(WARM_ROUNDS, WARM_ROUNDS + self.bench.rounds):
            for key, pair in self._round(round_):
                stamps[key].append(pair)
        clock.wait()
        self.times = {k: [clock.between(*pair) for pair in v] for k, v in stamps.items()}

    def _round(self, number: int) -> list[tuple[Key, tuple[Any, Any]]]:
        """Begin and end of each side, in an order of the round's own, the same on all ranks: what
        ran before a side has drawn power, of which it has more or less for that."""
        clock, keys, found = self.bench.clock, list(self._calls), []
        for key in Random(number).sample(keys, len(keys)):
            call, company = self._calls[key]
            clock.flush()
            if company is not None:
                company.start()
            begin = clock.stamp()
            call()
            end = clock.stamp()
            if company is not None:
                company.join(end)
            found.append((key, (begin, end)))
        return found

    def time(self, side: str, what: str, mode: str = "graph") -> Time | None:
        """Of a side that took part. `backward` is the difference of `both` and `forward`."""
        if what != "backward":
            values = self.times.get(Key(side, what, mode))
            return time_of(values) if values else None
        both = self.times.get(Key(side, "both", mode))
        forward = self.times.get(Key(side, "forward", mode))
        return backward_time(both, forward) if both and forward else None

    def record(
        self,
        side: str,
        what: str,
        mode: str = "graph",
        *,
        flops: float = 0,
        other: float | None = None,
        bars: tuple[float, float | None] | None = None,
        note: str = "",
    ) -> list[Record]:
        """The result of a side, or nothing if it has none.

        Args:
            flops: of a run. other: milliseconds to compare with.
            bars: bar and goal of the ratio.
        """
        time = self.time(side, what, mode)
        if time is None:
            return []
        rate = flops / time.ms * 1e-9 if flops and time.ms > 0 else None
        ratio = None if other is None or time.ms <= 0 else other / time.ms
        bar, goal = bars if bars is not None and ratio is not None else (None, None)
        judged = (rate, ratio, bar, goal, note)
        return [Record(self.suite, self.shape, side, what, mode, *time, *judged)]
