"""Several ranks that measure together, each on its own device, every run begun by all at once.

A figure is the largest of the ranks' medians. Whatever cannot run on one rank, or gives wrong
results there, takes part on none: all ranks make the same calls in the same order.
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
    Bench,
    Call,
    Clock,
    Company,
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
"""About 0.1 ms in which the host gets ahead of the GPU, or a late launch would be measured."""


class RankClock(Clock, Protocol):
    """A `Clock` of ranks that begin every run together."""

    def meet(self) -> None:
        """Let this rank's stream wait for those of all others."""


class Gpus(Gpu):
    """The GPU of a rank. Graphs share their memory: nobody reads a result after the next capture.

    The ranks meet outside of what is measured, and exchanges begin anew there, as in a step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._one = torch.zeros(1, device=self.device)
        self._own_pool()

    def _own_pool(self) -> None:
        # Other threads, as those of NCCL, may call CUDA meanwhile.
        self._how = dict(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        self._first = torch.cuda.CUDAGraph()  # a pool that all graphs have left is not used again
        with torch.cuda.graph(self._first, **self._how):
            self._one.zero_()

    def meet(self) -> None:
        if dist.get_world_size() > 1:
            dist.all_reduce(self._one)
            begin_exchanges()

    def flush(self) -> None:
        super().flush()
        torch.cuda._sleep(_HEAD_START_CYCLES)
        self.meet()

    def free(self) -> None:
        gc.collect()  # of graphs first, then of the memory that they exchange in
        torch.cuda.synchronize()
        dist.barrier()  # no rank still writes to this one
        release_exchanges()
        self._first.reset()
        super().free()
        self._own_pool()


class Cpus:
    """The same on CPUs, to try the program: eager calls, no cache to flush."""

    device = torch.device("cpu")

    def meet(self) -> None:
        if dist.get_world_size() > 1:
            dist.barrier()

    def flush(self) -> None:
        self.meet()

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
    """What every suite is given on a rank."""

    clock: RankClock
    transports: tuple[str, ...] = ()
    """Names for `parallel.dispatcher.base.make_dispatcher`."""
    comm_sms: int = 0
    """SMs that push in a layer, as parallel.comm_sms."""

    @property
    def mode(self) -> str:
        """How everything is measured: CUDA graphs, where there are any."""
        return "graph" if self.clock.device.type == "cuda" else "eager"

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """Of all ranks, in their order."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def agreed(self, why: str) -> str:
        """Why something cannot be on the first rank that has a reason; empty if none has."""
        notes = self.gather(why)
        return next((f"rank {r}: {note}" for r, note in enumerate(notes) if note), "")

    def sides(self, suite: str, shape: Shape) -> "RankSides":
        return RankSides(self, suite, shape)


class RankSides(Sides):
    """What is compared on a shape by all ranks together."""

    bench: RankBench

    def __init__(self, bench: RankBench, suite: str, shape: Shape) -> None:
        super().__init__(bench, suite, shape)
        self._of_ranks: list[dict[Key, list[float]]] = []
        self._read: list[Call] = []
        """Calls whose graphs are replayed: they keep the tensors that those read."""

    def take(
        self,
        side: str,
        what: str,
        call: Callable[[], Any],
        check: Callable[[Any], str] = lambda _: "",
        company: Company | None = None,
    ) -> None:
        """As `add`, on all ranks or on none; all ranks make this call.

        Args:
            check: why the result of the captured call is wrong; empty if it is right.
        """
        kept: list[Any] = []

        def call_and_keep() -> None:
            kept.clear()
            kept.append(call())

        before, mode, clock = len(self.lost), self.bench.mode, self.bench.clock
        self._read.append(call)
        clock.meet()
        # Before captures: ranks that make one meet more often than ranks that cannot.
        why = self.bench.agreed(_failure(call_and_keep, clock))
        if not why:
            clock.meet()
            self.add(side, what, call_and_keep, modes=(mode,), company=company)
            clock.meet()  # what others send this rank is here
            clock.wait()
            own = self.lost.pop().note if len(self.lost) > before else check(kept[0])
            why = self.bench.agreed(own)
        kept.clear()
        if why:
            self._calls.pop(Key(side, what, mode), None)
            self.lose(side, what, mode, why, failed=True)

    def run(self) -> None:
        super().run()
        self._of_ranks = self.bench.gather(self.times)

    def medians(self, side: str, what: str) -> list[Time]:
        """Of each rank; empty if the side did not take part.

        `<pass> backward` is the difference of `<pass> both` and `<pass>`, `backward` that of `both`
        and `forward`.
        """
        found = []
        for times in self._of_ranks:
            if what.endswith("backward"):
                both, forward = (times.get(Key(side, w, self.bench.mode)) for w in _pair(what))
                if both and forward:
                    found.append(backward_time(both, forward))
            elif values := times.get(Key(side, what, self.bench.mode)):
                found.append(time_of(values))
        return found

    def time(self, side: str, what: str, mode: str = "") -> Time | None:
        """Of the slowest rank."""
        return max(self.medians(side, what), default=None)

    def record(self, side: str, what: str, mode: str = "", **judged: Any) -> list[Record]:
        ranks = tuple(round(time.ms, 4) for time in self.medians(side, what))
        made = super().record(side, what, self.bench.mode, **judged)
        return [replace(record, ranks=ranks) for record in made]


def _failure(call: Call, clock: Clock) -> str:
    """Why a call cannot run; empty if it can."""
    try:
        call()
        clock.wait()
    except Exception as error:
        return missing() or reason(error)
    return ""


def _pair(backward: str) -> tuple[str, str]:
    """What is measured with the backward pass, and without it."""
    what = backward.removesuffix("backward").strip()
    return (f"{what} both", what) if what else ("both", "forward")


def attempt(bench: RankBench, call: Callable[[], list[Record]], suite: str, shape: Shape) -> Any:
    """Records of a suite; those of an error if it raises on any rank."""
    try:
        made, why = call(), ""
    except Exception as error:
        made, why = [], missing() or reason(error)
        # At once: the others may wait for this one until their time is up.
        print(f"rank {bench.rank}: {suite}: {why}", file=sys.stderr, flush=True)
    if why := bench.agreed(why):
        made = [*made, Record(suite, shape, "-", "-", "", note=why, failed=True)]
    return made


def differing(found: Sequence[Any], expected: Sequence[Any], names: Sequence[str]) -> str:
    """Which results have not exactly the expected bits; empty if all have."""
    wrong = [
        name
        for name, a, b in zip(names, found, expected, strict=True)
        if a.shape != b.shape or not torch.equal(a, b)
    ]
    return f"wrong bits in {', '.join(wrong)}" if wrong else ""
