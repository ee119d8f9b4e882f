"""Medians of interleaved rounds, on one device or on several ranks together.

A round runs every case once, in another order each time, so that a falling clock affects all of
them, and flushes the L2 cache before every call. Warm-up rounds are not counted; `Bench.warm`
seconds of them bring clocks and power to those of a long run. The host synchronizes only at the
end: launches of an eager call that keep ahead of the GPU cost it nothing.

Ranks make the same calls in the same order. A time is the largest of the ranks' medians, and a call
that cannot run on one rank, or gives wrong results there, is skipped on all.

A suite yields `Case`s, and `measure` makes its records of them. A suite that needs times before its
records are complete uses `Timings` directly.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median
from time import monotonic
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.scripts.lab.bench.clocks import Call, Clock
from phalanx.scripts.lab.bench.loads import BackgroundLoad
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import Bars, Shape

WARM_ROUNDS = 3


class Time(NamedTuple):
    """Milliseconds: median, and the spread of the rounds."""

    ms: float
    p10: float
    p90: float


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile, linearly interpolated."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def time_of(values: Sequence[float]) -> Time:
    """Median and spread of the rounds' milliseconds."""
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


def differing(values: Sequence[Any], expected: Sequence[Any], names: Sequence[str]) -> str:
    """Name the results that differ in a bit from those expected; empty if none does."""
    wrong = [
        name
        for name, a, b in zip(names, values, expected, strict=True)
        if a.shape != b.shape or not a.equal(b)
    ]
    return f"wrong bits in {', '.join(wrong)}" if wrong else ""


@dataclass
class Bench:
    """Device and options of all suites, on one process or on a rank of a process group."""

    clock: Clock
    rounds: int
    peers: tuple[str, ...] = ()
    """Subset of `torch`, `te`, `sonic` to compare with."""
    demanded: bool = False
    """Peers or transports were named one by one, so a missing one is an error."""
    backend: str = "fused"
    shapes: Mapping[str, Sequence[Shape]] = field(default_factory=dict)
    """All shapes of each suite."""
    warm: float = 0.0
    """Seconds of warm-up rounds."""
    transports: tuple[str, ...] = ()
    """Names for `parallel.dispatcher.base.make_dispatcher`; only on ranks."""
    exchange: SymmOptions = SymmOptions()  # noqa: RUF009  (frozen)
    """Options of exchanges in a layer."""
    connections: Connections = field(default_factory=Connections)
    """Memory shared with other ranks."""

    @property
    def mode(self) -> str:
        """Default mode of timed calls: CUDA graphs if there is a GPU."""
        return "graph" if self.clock.device.type == "cuda" else "eager"

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks, in rank order."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def agreed(self, why: str) -> str:
        """The first non-empty reason of any rank, with its rank; empty if there is none."""
        if not dist.is_initialized():
            return why
        notes = self.gather(why)
        return next((f"rank {r}: {note}" for r, note in enumerate(notes) if note), "")

    def timings(self, suite: str, shape: Shape) -> "Timings":
        return Timings(self, suite, shape)


@dataclass(frozen=True)
class Case:
    """A call to time, and the record of its time."""

    side: str
    """Implementation or condition."""
    pass_name: str
    call: Call | None = None
    """None: the call of an earlier case with this side and pass."""
    flops: float = 0
    """Operations of the call."""
    against: float | str | Sequence[str] | None = None
    """Milliseconds to compare with, or the side, or the sides of which the fastest."""
    bars: tuple[float, float | None] | None = None
    """Bar and goal of the ratio of `against` to the time."""
    note: str = ""
    report: str | None = None
    """Pass of the record, `pass_name` if None, no record if empty. `backward` after `both` or
    `<pass> backward` after `<pass> both` is the difference to `forward` or `<pass>`."""
    forward_of: str = ""
    """Side whose forward pass that difference is to, if not this one."""
    modes: tuple[str, ...] = ()
    """`eager`, `graph`; default: `Bench.mode`."""
    ours: bool = True
    """A capture that fails is a failure; a peer only has to run eagerly."""
    check: Callable[[Any], str] | None = None
    """Returns why the result of the call is wrong; empty if it is right."""
    load: BackgroundLoad | None = None
    """Work that overlaps the call."""


class Key(NamedTuple):
    """A timed call."""

    side: str
    pass_name: str
    mode: str = "graph"


class Timings:
    """Calls that are timed together; one that cannot run becomes a record with the reason."""

    def __init__(self, bench: Bench, suite: str, shape: Shape) -> None:
        self.bench, self.suite, self.shape = bench, suite, shape
        self.skipped: list[Record] = []
        self.times: dict[Key, list[float]] = {}
        """Milliseconds of each round on this rank."""
        self.of_ranks: list[dict[Key, list[float]]] = []
        self._calls: dict[Key, tuple[Call, Case]] = {}

    def add(self, case: Case) -> None:
        """Run a call once, capture it in mode `graph`, and time it; collective over the ranks."""
        bench, clock, result = self.bench, self.bench.clock, list[Any]()
        modes = case.modes or (bench.mode,)

        def call() -> None:
            assert case.call is not None
            result.clear()
            output = case.call()
            if case.check is not None:
                result.append(output)

        clock.align_ranks()
        # Agree before captures: a rank that captures aligns more often than one that cannot.
        if why := bench.agreed(self._failure(call)):
            self.skip(case.side, case.pass_name, modes[0], why, failed=True)
            return
        for mode in modes:
            clock.align_ranks()
            ready, why = cast(Call, call), ""
            if mode == "graph":
                try:
                    ready = clock.capture(call)
                except Exception as error:
                    why = f"no capture: {reason(error)}"
            clock.align_ranks()  # rows sent by other ranks have arrived
            clock.wait()
            failed = case.ours or not why
            if case.check is not None and not why:
                why = case.check(result[0])
            if why := bench.agreed(why):
                self.skip(case.side, case.pass_name, mode, why, failed=failed)
            else:  # a graph reads tensors that only the call of the case keeps alive
                self._calls[Key(case.side, case.pass_name, mode)] = ready, case
        result.clear()

    def _failure(self, call: Call) -> str:
        """The reason why a call cannot run; empty if it can."""
        try:
            call()
            self.bench.clock.wait()
        except Exception as error:
            return self.bench.connections.missing() or reason(error)
        return ""

    def skip(self, side: str, pass_name: str, mode: str, why: str, *, failed: bool) -> None:
        """Record why there will be no result."""
        head = (self.suite, self.shape, side, pass_name, mode)
        self.skipped.append(Record(*head, note=why, failed=failed))

    def run(self) -> None:
        """Time all calls in interleaved rounds; collective over the ranks."""
        clock, keys = self.bench.clock, list(self._calls)
        stamps: dict[Key, list[tuple[Any, Any]]] = {key: [] for key in keys}
        for number in range(WARM_ROUNDS):
            self._round(number)
        until = monotonic() + self.bench.warm
        while keys and monotonic() < until:
            self._round(0)
            clock.wait()
        for number in range(WARM_ROUNDS, WARM_ROUNDS + self.bench.rounds):
            for key, pair in self._round(number):
                stamps[key].append(pair)
        clock.wait()
        self.times = {k: [clock.between(*pair) for pair in v] for k, v in stamps.items()}
        self.of_ranks = self.bench.gather(self.times)

    def _round(self, number: int) -> list[tuple[Key, tuple[Any, Any]]]:
        """Start and end stamps of each call, in an order drawn per round, the same on all ranks.

        The order varies because the call that ran before has drawn power.
        """
        clock, keys, stamps = self.bench.clock, list(self._calls), []
        for key in Random(number).sample(keys, len(keys)):
            call, case = self._calls[key]
            clock.flush()
            if case.load is not None:
                case.load.start()
            begin = clock.stamp()
            call()
            end = clock.stamp()
            if case.load is not None:
                case.load.join(end)
            stamps.append((key, (begin, end)))
        return stamps

    def medians(
        self, side: str, pass_name: str, mode: str = "", forward_of: str = ""
    ) -> list[Time]:
        """Time of each rank; empty if the call was skipped. See `Case.report` for `backward`."""
        mode, prefix = mode or self.bench.mode, pass_name.removesuffix("backward").rstrip()
        key = Key(side, pass_name, mode)
        medians = []
        for times in self.of_ranks:
            if prefix != pass_name:
                both = times.get(Key(side, f"{prefix} both".lstrip(), mode))
                forward = times.get(Key(forward_of or side, prefix or "forward", mode))
                if both and forward:
                    medians.append(backward_time(both, forward))
            elif values := times.get(key):
                medians.append(time_of(values))
        return medians

    def time(self, side: str, pass_name: str, mode: str = "", forward_of: str = "") -> Time | None:
        """Time of the slowest rank, or None if the call was skipped."""
        return max(self.medians(side, pass_name, mode, forward_of), default=None)

    def record(self, case: Case, mode: str = "") -> list[Record]:
        """The record of a timed case; empty if there is none."""
        pass_name = case.pass_name if case.report is None else case.report
        time = self.time(case.side, pass_name, mode, case.forward_of) if pass_name else None
        if time is None:
            return []
        rate = case.flops / time.ms * 1e-9 if case.flops and time.ms > 0 else None
        other = self._other(case.against, pass_name, mode)
        ratio = None if other is None or time.ms <= 0 else other / time.ms
        bar, goal = case.bars if case.bars is not None and ratio is not None else (None, None)
        head = (self.suite, self.shape, case.side, pass_name, mode or self.bench.mode)
        record = Record(*head, *time, rate, ratio, bar, goal, case.note)
        if not dist.is_initialized():
            return [record]
        ranks = self.medians(case.side, pass_name, mode, case.forward_of)
        return [replace(record, ranks=tuple(round(rank.ms, 4) for rank in ranks))]

    def _other(
        self, against: float | str | Sequence[str] | None, pass_name: str, mode: str
    ) -> float | None:
        if against is None or isinstance(against, int | float):
            return against
        sides = [against] if isinstance(against, str) else against
        times = [self.time(side, pass_name, mode) for side in sides]
        return min((time.ms for time in times if time is not None), default=None)


def passes(
    side: str, forward: Call, both: Call, flops: float = 0, bars: Bars | None = None, **options: Any
) -> Iterator[Case]:
    """Cases of a forward pass of `flops` and of the backward pass, of twice as many.

    Args:
        both: runs forward and backward.
        options: further fields of both cases.
    """
    for name, call, times in (("forward", forward, 1), ("backward", both, 2)):
        judged = None if bars is None else bars.of(name)
        pass_name = "both" if times == 2 else name
        yield Case(side, pass_name, call, times * flops, bars=judged, report=name, **options)


def measure(timings: Timings, cases: Iterable[Case], *, by_pass: bool = False) -> list[Record]:
    """Time all cases together; their records, then those of skipped calls.

    Records are in the order of the cases, mode by mode, or mode by mode and pass by pass.
    """
    cases = list(cases)
    for case in cases:
        if case.call is not None:
            timings.add(case)
    timings.run()
    default = (timings.bench.mode,)
    modes = list(dict.fromkeys(mode for case in cases for mode in case.modes or default))
    names = list(dict.fromkeys(case.report or case.pass_name for case in cases))
    rows = [(mode, case) for mode in modes for case in cases if mode in (case.modes or default)]
    if by_pass:
        rows.sort(key=lambda r: (modes.index(r[0]), names.index(r[1].report or r[1].pass_name)))
    records = [record for mode, case in rows for record in timings.record(case, mode)]
    return [*records, *dict.fromkeys(timings.skipped)]


def attempt(bench: Bench, call: Callable[[], list[Record]], suite: str, shape: Shape) -> Any:
    """Records of a suite, and one of the error if it raises on any rank."""
    try:
        records, why = call(), ""
    except Exception as error:
        records, why = [], bench.connections.missing() or reason(error)
        if dist.is_initialized():  # at once: the other ranks may wait for this one
            print(f"rank {bench.rank}: {suite}: {why}", file=sys.stderr, flush=True)
    if why := bench.agreed(why):
        records = [*records, Record(suite, shape, "-", "-", "", note=why, failed=True)]
    return records
