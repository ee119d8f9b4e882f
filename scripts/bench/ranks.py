"""Ranks that measure together, each on its own device; all start every call at the same time.

A time is the largest of the ranks' medians. A call that cannot run on one rank, or gives wrong
results there, is skipped on all: all ranks make the same calls in the same order.
"""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from phalanx.parallel.dispatcher.exchange import begin_exchanges, missing, release_exchanges
from phalanx.scripts.bench.measure import (
    BackgroundLoad,
    Bench,
    Call,
    Clock,
    Gpu,
    Key,
    Sides,
    Time,
    backward_time,
    reason,
    time_of,
)
from phalanx.scripts.bench.records import Record
from phalanx.scripts.bench.shapes import Shape

_HEAD_START_CYCLES = 200_000
"""About 0.1 ms in which the host gets ahead of the GPU, so that no late launch is timed."""


class RankClock(Clock, Protocol):
    """A `Clock` of ranks that start every call together."""

    def align_ranks(self) -> None:
        """Make this rank's stream wait for those of all other ranks."""


class Gpus(Gpu):
    """The GPU of a rank. Graphs share a memory pool: no result is read after the next capture.

    The ranks are aligned outside the timed region, and exchanges restart there, as in a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._one = torch.zeros(1, device=self.device)
        self._own_pool()

    def _new_pool(self) -> None:
        # thread_local: other threads, such as NCCL's, may call CUDA during a capture.
        self._capture_options = dict(
            pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local"
        )
        self._first = torch.cuda.CUDAGraph()  # keeps the pool alive: an empty pool is not reused
        with torch.cuda.graph(self._first, **self._capture_options):
            self._one.zero_()

    def align_ranks(self) -> None:
        if dist.get_world_size() > 1:
            dist.all_reduce(self._one)
            begin_exchanges()

    def flush(self) -> None:
        super().flush()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        self.align_ranks()

    def free(self) -> None:
        gc.collect()  # graphs before the exchange memory that they use
        torch.cuda.synchronize()
        dist.barrier()  # no rank still writes to this one's memory
        release_exchanges()
        self._first.reset()
        super().free()
        self._own_pool()


class Cpus:
    """The same on CPUs, to try the benchmark: eager calls, no cache to flush."""

    device = torch.device("cpu")

    def align_ranks(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()

    def flush(self) -> None:
        self.align_ranks()

    def stamp(self) -> float:
        return time.perf_counter()

    def between(self, begin: float, end: float) -> float:
        return 1000 * (end - begin)

    def wait(self) -> None: ...

    def capture(self, call: Call) -> Call:
        return call

    def free(self) -> None:
        gc.collect()


@dataclass
class RankBench(Bench):
    """Options and device of all suites on a rank."""

    clock: RankClock
    transports: tuple[str, ...] = ()
    """Names for `parallel.dispatcher.base.make_dispatcher`."""
    comm_sms: int = 0
    """SMs that push in a layer, as parallel.comm_sms."""

    @property
    def mode(self) -> str:
        """Mode of all timed calls: CUDA graphs if there is a GPU."""
        return "graph" if self.clock.device.type == "cuda" else "eager"

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Values of all ranks, in rank order."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values

    def agreed(self, why: str) -> str:
        """The first non-empty reason of any rank, with its rank; empty if there is none."""
        notes = self.gather(why)
        return next((f"rank {r}: {note}" for r, note in enumerate(notes) if note), "")

    def sides(self, suite: str, shape: Shape) -> "RankSides":
        return RankSides(self, suite, shape)


class RankSides(Sides):
    """Calls compared on a shape by all ranks together."""

    bench: RankBench

    def __init__(self, bench: RankBench, suite: str, shape: Shape) -> None:
        super().__init__(bench, suite, shape)
        self._of_ranks: list[dict[Key, list[float]]] = []
        self._read: list[Call] = []
        """Calls whose graphs are replayed; they hold the tensors that the graphs read."""

    def take(
        self,
        side: str,
        pass_name: str,
        call: Callable[[], Any],
        check: Callable[[Any], str] = lambda _: "",
        background_load: BackgroundLoad | None = None,
    ) -> None:
        """Add a call on all ranks or on none, like `add`; collective.

        Args:
            check: returns why the result of the captured call is wrong; empty if it is right.
        """
        result: list[Any] = []

        def call_and_keep() -> None:
            result.clear()
            result.append(call())

        before, mode, clock = len(self.skipped), self.bench.mode, self.bench.clock
        self._read.append(call)
        clock.align_ranks()
        # Agree before captures: a rank that captures aligns more often than one that cannot.
        why = self.bench.agreed(_failure(call_and_keep, clock))
        if not why:
            clock.align_ranks()
            self.add(side, pass_name, call_and_keep, modes=(mode,), background_load=background_load)
            clock.align_ranks()  # rows sent by other ranks have arrived
            clock.wait()
            failure = self.skipped.pop().note if len(self.skipped) > before else check(result[0])
            why = self.bench.agreed(failure)
        result.clear()
        if why:
            self._calls.pop(Key(side, pass_name, mode), None)
            self.skip(side, pass_name, mode, why, failed=True)

    def run(self) -> None:
        super().run()
        self._of_ranks = self.bench.gather(self.times)

    def medians(self, side: str, pass_name: str) -> list[Time]:
        """Time of each rank; empty if the side was skipped.

        `<pass> backward` is the difference of `<pass> both` and `<pass>`, `backward` that of `both`
        and `forward`.
        """
        medians = []
        for times in self._of_ranks:
            if pass_name.endswith("backward"):
                both, forward = (times.get(Key(side, w, self.bench.mode)) for w in _pair(pass_name))
                if both and forward:
                    medians.append(backward_time(both, forward))
            elif values := times.get(Key(side, pass_name, self.bench.mode)):
                medians.append(time_of(values))
        return medians

    def time(self, side: str, pass_name: str, mode: str = "") -> Time | None:
        """Time of the slowest rank."""
        return max(self.medians(side, pass_name), default=None)

    def record(self, side: str, pass_name: str, mode: str = "", **judged: Any) -> list[Record]:
        ranks = tuple(round(time.ms, 4) for time in self.medians(side, pass_name))
        records = super().record(side, pass_name, self.bench.mode, **judged)
        return [replace(record, ranks=ranks) for record in records]


def _failure(call: Call, clock: Clock) -> str:
    """The reason why a call cannot run; empty if it can."""
    try:
        call()
        clock.wait()
    except Exception as error:
        return missing() or reason(error)
    return ""


def _pair(backward: str) -> tuple[str, str]:
    """Names of the pass with backward and of the one without."""
    pass_name = backward.removesuffix("backward").strip()
    return (f"{pass_name} both", pass_name) if pass_name else ("both", "forward")


def attempt(bench: RankBench, call: Callable[[], list[Record]], suite: str, shape: Shape) -> Any:
    """Records of a suite, and one of the error if it raises on any rank."""
    try:
        records, why = call(), ""
    except Exception as error:
        records, why = [], missing() or reason(error)
        # Printed at once: the other ranks may wait for this one until their timeout.
        print(f"rank {bench.rank}: {suite}: {why}", file=sys.stderr, flush=True)
    if why := bench.agreed(why):
        records = [*records, Record(suite, shape, "-", "-", "", note=why, failed=True)]
    return records


def differing(values: Sequence[Any], expected: Sequence[Any], names: Sequence[str]) -> str:
    """Name the results that differ in a bit from those expected; empty if none does."""
    wrong = [
        name
        for name, a, b in zip(names, values, expected, strict=True)
        if a.shape != b.shape or not torch.equal(a, b)
    ]
    return f"wrong bits in {', '.join(wrong)}" if wrong else ""
