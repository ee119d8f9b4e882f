"""Medians of interleaved rounds, on one device or on several ranks together.

A round runs every case once, in another order each time, so that a falling clock affects all of
them, and flushes the L2 cache before every call. `Bench.warm` seconds of uncounted rounds bring
clocks and power to those of a long run. The host synchronizes only at the end: launches of an eager
call that keep ahead of the GPU cost it nothing.

A time is the largest of the ranks' medians, and a call that cannot run on one rank, or gives wrong
results there, is skipped on all. A suite yields `Case`s, and `Timings.measure` makes its records of
them.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import median, quantiles
from time import monotonic
from typing import Any, NamedTuple

import torch.distributed as dist

from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.scripts.lab.bench.clocks import Call, Cpu
from phalanx.scripts.lab.bench.loads import BackgroundLoad
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import Bars, Shape

WARM_ROUNDS = 3


class Time(NamedTuple):
    """Milliseconds: median, and the spread of the rounds."""

    ms: float
    p10: float
    p90: float


def time_of(rounds: Sequence[float], less: Sequence[float] = ()) -> Time:
    """Median and spread of the rounds' milliseconds, `less` those of another call.

    Of two calls: difference of the medians, spread of the rounds' differences.
    """
    ms = median(rounds)
    if less:
        ms -= median(less)
        rounds = [a - b for a, b in zip(rounds, less, strict=True)]
    tenths = quantiles(rounds, n=10, method="inclusive") if len(rounds) > 1 else [*rounds] * 9
    return Time(ms, tenths[0], tenths[-1])


def reason(error: BaseException) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    return f"{type(error).__name__}: {' '.join(text.split())}"[:200]


def differing(values: Sequence[Any], expected: Sequence[Any], names: Sequence[str]) -> str:
    """Name the results that differ in a bit from those expected; empty if none does."""
    pairs = zip(names, values, expected, strict=True)
    wrong = [name for name, a, b in pairs if a.shape != b.shape or not a.equal(b)]
    return f"wrong bits in {', '.join(wrong)}" if wrong else ""


@dataclass
class Bench:
    """Device and options of all suites, on one process or on a rank of a process group."""

    clock: Cpu
    rounds: int
    peers: tuple[str, ...] = ()  # subset of `torch`, `te`, `sonic` to compare with
    demanded: bool = False  # named one by one, so a missing one is an error
    backend: str = "fused"
    shapes: Mapping[str, Sequence[Shape]] = field(default_factory=dict)  # all shapes of each suite
    warm: float = 0.0  # seconds of warm-up rounds
    transports: tuple[str, ...] = ()  # for `make_dispatcher`; only on ranks
    exchange: SymmOptions = SymmOptions()  # noqa: RUF009  (frozen)
    connections: Connections = field(default_factory=Connections)  # memory shared with other ranks

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
        values: list[Any] = [value] * self.ranks
        if dist.is_initialized():
            dist.all_gather_object(values, value)
        return values

    def agreed(self, why: str) -> str:
        """The first non-empty reason of any rank, with its rank; empty if there is none."""
        if not dist.is_initialized():
            return why
        return next((f"rank {r}: {note}" for r, note in enumerate(self.gather(why)) if note), "")

    def timings(self, suite: str, shape: Shape) -> "Timings":
        return Timings(self, suite, shape)

    def attempt(self, call: Callable[[], list[Record]], suite: str, shape: Shape) -> list[Record]:
        """Records of a suite, and one of the error if it raises on any rank."""
        try:
            records, why = call(), ""
        except Exception as error:
            records, why = [], self.connections.missing() or reason(error)
            if dist.is_initialized():  # at once: the other ranks may wait for this one
                print(f"rank {self.rank}: {suite}: {why}", file=sys.stderr, flush=True)
        if why := self.agreed(why):
            records = [*records, Record(suite, shape, "-", "-", "", note=why, failed=True)]
        return records


@dataclass(frozen=True)
class Case:
    """A call to time, and the record of its time."""

    side: str  # implementation or condition
    pass_name: str
    call: Call | None = None  # none: the call of an earlier case with this side and pass
    flops: float = 0  # operations of the call
    against: float | str | Sequence[str] | None = None
    """Milliseconds to compare with, or the side, or the sides of which the fastest."""
    bars: tuple[float, float | None] | None = None  # and goal of `against` over the time
    note: str = ""
    report: str = ""
    """Pass of the record, if not `pass_name`. `backward` after `both` or `<pass> backward` after
    `<pass> both` is the difference to `forward` or `<pass>`."""
    forward_of: str = ""  # side whose forward pass that difference is to, if not this one
    mode: str = ""  # `eager` or `graph`; empty: that of the bench
    ours: bool = True  # a capture that fails is a failure; a peer only has to run eagerly
    check: Callable[[Any], str] | None = None  # why the result is wrong, or ""
    load: BackgroundLoad | None = None  # work that overlaps the call


Key = tuple[str, str, str]  # side, pass and mode of a timed call


class Timings:
    """Calls that are timed together; one that cannot run becomes a record with the reason."""

    def __init__(self, bench: Bench, suite: str, shape: Shape) -> None:
        self.bench, self.suite, self.shape = bench, suite, shape
        self.skipped: list[Record] = []
        self.of_ranks: list[dict[Key, list[float]]] = []  # of each round and rank
        self._calls: dict[Key, tuple[Call, Case]] = {}

    def measure(self, cases: Iterable[Case]) -> list[Record]:
        """Time all cases together; their records by mode and pass, then those of skipped calls."""
        cases = list(cases)
        for case in cases:
            if case.call is not None:
                self.add(case)
        self.run()
        modes, names = (
            list(dict.fromkeys(found))
            for found in ([c.mode for c in cases], [c.report or c.pass_name for c in cases])
        )
        cases.sort(key=lambda c: (modes.index(c.mode), names.index(c.report or c.pass_name)))
        return [*(r for case in cases for r in self.record(case)), *dict.fromkeys(self.skipped)]

    def add(self, case: Case) -> None:
        """Run a call once, capture it in mode `graph`, and time it; collective over the ranks."""
        bench, clock, result = self.bench, self.bench.clock, list[Any]()
        mode, failed, ready = case.mode or bench.mode, True, case.call

        def call() -> None:
            assert case.call is not None
            result.clear()
            output = case.call()
            if case.check is not None:
                result.append(output)

        clock.align_ranks()
        # Agree before captures: a rank that captures aligns more often than one that cannot.
        why = bench.agreed(self._failure(call))
        if not why:
            clock.align_ranks()
            ready = call
            if mode == "graph":
                try:
                    ready = clock.capture(call)
                except Exception as error:
                    why, failed = f"no capture: {reason(error)}", case.ours
            clock.align_ranks()  # rows sent by other ranks have arrived
            clock.wait()
            if case.check is not None and not why:
                why = case.check(result[0])
            why = bench.agreed(why)
        if why:
            self.skip(case.side, case.pass_name, mode, why, failed=failed)
        elif ready is not None:  # a graph reads tensors that only the call of the case keeps alive
            self._calls[case.side, case.pass_name, mode] = ready, case
        result.clear()

    def _failure(self, call: Call) -> str:
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
        clock, stamps = self.bench.clock, {key: list[tuple[Any, Any]]() for key in self._calls}
        for number in range(WARM_ROUNDS):
            self._round(number)
        until = monotonic() + self.bench.warm
        while stamps and monotonic() < until:
            self._round(0)
            clock.wait()
        for number in range(WARM_ROUNDS, WARM_ROUNDS + self.bench.rounds):
            for key, pair in self._round(number):
                stamps[key].append(pair)
        clock.wait()
        times = {key: [clock.between(*pair) for pair in pairs] for key, pairs in stamps.items()}
        self.of_ranks = self.bench.gather(times)

    def _round(self, number: int) -> list[tuple[Key, tuple[Any, Any]]]:
        """Start and end stamps of each call, in a drawn order, the same on all ranks.

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
        keys = [(side, pass_name, mode)]
        if prefix != pass_name:
            keys = [(side, f"{prefix} both".lstrip(), mode)]
            keys.append((forward_of or side, prefix or "forward", mode))
        rounds = ([times.get(key, []) for key in keys] for times in self.of_ranks)
        return [time_of(*found) for found in rounds if all(found)]

    def time(self, side: str, pass_name: str, mode: str = "") -> Time | None:
        """Time of the slowest rank, or None if the call was skipped."""
        return max(self.medians(side, pass_name, mode), default=None)

    def record(self, case: Case) -> list[Record]:
        pass_name, mode = case.report or case.pass_name, case.mode or self.bench.mode
        ranks = self.medians(case.side, pass_name, mode, case.forward_of)
        if not ranks:
            return []
        time, other = max(ranks), self._other(case.against, pass_name, mode)
        rate = case.flops / time.ms * 1e-9 if case.flops and time.ms > 0 else None
        ratio = None if other is None or time.ms <= 0 else other / time.ms
        bar, goal = case.bars if case.bars is not None and ratio is not None else (None, None)
        each = tuple(round(rank.ms, 4) for rank in ranks) if dist.is_initialized() else ()
        head = (self.suite, self.shape, case.side, pass_name, mode)
        return [Record(*head, *time, rate, ratio, bar, goal, case.note, ranks=each)]

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

    `both` runs forward and backward; `options` are further fields of both cases.
    """
    judged = [bars and bars.of(name) for name in ("forward", "backward")]
    yield Case(side, "forward", forward, flops, bars=judged[0], **options)
    yield Case(side, "both", both, 2 * flops, bars=judged[1], report="backward", **options)
