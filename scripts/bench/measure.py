"""Medians of interleaved rounds on one GPU, the L2 cache flushed before every run.

A round runs every side once, in another order each time, so that a falling clock affects all of
them. Warm-up rounds are not counted; `Bench.warm` seconds of them bring clocks and power to those
of a long run. The host synchronizes only at the end: launches of an eager side that keep ahead of
the GPU cost it nothing.
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
"""Head start of the background load; about 30 us."""


class Clock(Protocol):
    """The device operations that timing needs."""

    device: torch.device

    def flush(self) -> None:
        """Evict the L2 cache."""

    def stamp(self) -> Any:
        """Record a timestamp on the current stream."""

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds between two stamps; only after `wait`."""

    def wait(self) -> None: ...

    def capture(self, call: Call) -> Call:
        """Replays of a CUDA graph of the call."""

    def free(self) -> None:
        """Return unused memory."""


class Gpu:
    """The current CUDA device as a `Clock`."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self._capture_stream = (
            torch.cuda.Stream()
        )  # one for all captures, as memory is kept for each stream
        self._capture_options: dict[str, Any] = {}  # of captures, for torch.cuda.graph

    def align_ranks(self) -> None:
        """Align the ranks that measure together, before a call, a capture and a replay."""

    def flush(self) -> None:
        self._flush_buffer.zero_()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def capture(self, call: Call) -> Call:
        self.align_ranks()
        self._capture_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._capture_stream):
            call()
        torch.cuda.current_stream().wait_stream(self._capture_stream)
        torch.cuda.synchronize()
        self.align_ranks()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, **self._capture_options):
                call()
        except Exception:
            torch.cuda.set_stream(before)
            self._recover()
            self.align_ranks()  # as ranks do that can replay theirs
            raise
        self.align_ranks()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def _recover(self) -> None:
        """Capture a harmless op: a failed capture leaves torch's generators in capture state."""
        with contextlib.suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph()):
            self._flush_buffer[:1].zero_()

    def free(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class BackgroundLoad(Protocol):
    """Work that overlaps a timed call."""

    @property
    def gigabytes_per_second(self) -> float:
        """Rate of the copies alone, bytes read plus written."""

    def shortest_lead(self) -> float:
        """Least milliseconds by which it outlasted a call; negative if it once ended earlier."""

    def start(self) -> None: ...

    def join(self, end: Any) -> None:
        """Wait for it; called after the end of the timed call was stamped."""


class Launches:
    """Base of a `BackgroundLoad` that launches on a stream of its own."""

    gigabytes_per_second = 0.0

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._ends: list[tuple[Any, Any]] = []

    def launch(self) -> None:
        """Launch work that starts before a timed call and ends after it."""
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
        """Milliseconds of the second of two launches, without other work."""
        with torch.cuda.stream(self._stream):
            self.launch()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.launch()
            end.record()
        end.synchronize()
        return begin.elapsed_time(end)


class Time(NamedTuple):
    """Median and percentiles of a time, in milliseconds."""

    ms: float
    p10: float
    p90: float


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile, linearly interpolated."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def time_of(values: Sequence[float]) -> Time:
    return Time(median(values), percentile(values, 0.1), percentile(values, 0.9))


def backward_time(both: Sequence[float], forward: Sequence[float]) -> Time:
    """Time of `both` minus `forward`: difference of medians, spread of the rounds' differences.

    Round i of one is paired with round i of the other.
    """
    differences = [b - f for b, f in zip(both, forward, strict=True)]
    ms = median(both) - median(forward)
    return Time(ms, percentile(differences, 0.1), percentile(differences, 0.9))


def reason(error: BaseException) -> str:
    """An error as one line, without colour codes."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return f"{type(error).__name__}: {' '.join(text.split())}"[:200]


class Key(NamedTuple):
    """Measured call: side, pass and mode."""

    side: str
    pass_name: str
    mode: str = "graph"


@dataclass
class Bench:
    """Options and device of all suites."""

    clock: Clock
    rounds: int
    peers: tuple[str, ...] = ()
    """Subset of `torch`, `te`, `sonic` to compare with."""
    demanded: bool = False
    """Peers were named one by one, so a missing one is an error."""
    backend: str = "fused"
    shapes: Mapping[str, Sequence[Shape]] = field(default_factory=dict)
    """All shapes of each suite."""
    warm: float = 0.0
    """Seconds of warm-up rounds."""

    def sides(self, suite: str, shape: Shape) -> "Sides":
        return Sides(self, suite, shape)


class Sides:
    """Calls compared on a shape; one that cannot run becomes a record with the reason."""

    def __init__(self, bench: Bench, suite: str, shape: Shape) -> None:
        self.bench, self.suite, self.shape = bench, suite, shape
        self.skipped: list[Record] = []
        self.times: dict[Key, list[float]] = {}
        self._calls: dict[Key, tuple[Call, BackgroundLoad | None]] = {}

    def add(
        self,
        side: str,
        pass_name: str,
        call: Call,
        *,
        modes: Sequence[str] = ("graph",),
        ours: bool = True,
        background_load: BackgroundLoad | None = None,
    ) -> None:
        """Run a call once, capture it in mode `graph`, and add it to the timed rounds.

        Args:
            modes: `eager`, `graph`.
            ours: whether a capture that fails is a failure; a peer only has to run eagerly.
            background_load: work that overlaps it.
        """
        clock = self.bench.clock
        try:
            call()
            clock.wait()
        except Exception as error:
            self.skip(side, pass_name, modes[0], reason(error), failed=True)
            return
        for mode in modes:
            try:
                ready = clock.capture(call) if mode == "graph" else call
            except Exception as error:
                why = f"no capture: {reason(error)}"
                self.skip(side, pass_name, mode, why, failed=ours)
                continue
            self._calls[Key(side, pass_name, mode)] = ready, background_load

    def skip(self, side: str, pass_name: str, mode: str, why: str, *, failed: bool) -> None:
        """Record why there will be no result."""
        self.skipped.append(
            Record(self.suite, self.shape, side, pass_name, mode, note=why, failed=failed)
        )

    def run(self) -> None:
        """Time all sides: milliseconds of each round, in the order of the rounds."""
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
        """Start and end stamps of each side, in an order drawn per round, the same on all ranks.

        The order varies because the side that ran before has drawn power.
        """
        clock, keys, stamps = self.bench.clock, list(self._calls), []
        for key in Random(number).sample(keys, len(keys)):
            call, background_load = self._calls[key]
            clock.flush()
            if background_load is not None:
                background_load.start()
            begin = clock.stamp()
            call()
            end = clock.stamp()
            if background_load is not None:
                background_load.join(end)
            stamps.append((key, (begin, end)))
        return stamps

    def time(self, side: str, pass_name: str, mode: str = "graph") -> Time | None:
        """Time of a side, or None. `backward` is the difference of `both` and `forward`."""
        if pass_name != "backward":
            values = self.times.get(Key(side, pass_name, mode))
            return time_of(values) if values else None
        both = self.times.get(Key(side, "both", mode))
        forward = self.times.get(Key(side, "forward", mode))
        return backward_time(both, forward) if both and forward else None

    def record(
        self,
        side: str,
        pass_name: str,
        mode: str = "graph",
        *,
        flops: float = 0,
        other: float | None = None,
        bars: tuple[float, float | None] | None = None,
        note: str = "",
    ) -> list[Record]:
        """The result of a side, or nothing if it has none.

        Args:
            flops: operations of a call. other: milliseconds to compare with.
            bars: bar and goal of the ratio `other` / time.
        """
        time = self.time(side, pass_name, mode)
        if time is None:
            return []
        rate = flops / time.ms * 1e-9 if flops and time.ms > 0 else None
        ratio = None if other is None or time.ms <= 0 else other / time.ms
        bar, goal = bars if bars is not None and ratio is not None else (None, None)
        judged = (rate, ratio, bar, goal, note)
        return [Record(self.suite, self.shape, side, pass_name, mode, *time, *judged)]
