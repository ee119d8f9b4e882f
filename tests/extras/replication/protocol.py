"""Model of the order of replica memory over `symm`: events on streams, in a random order.

As in `protocol`, which runs it, every rank has the same program on streams, those of compute, of
pushes and of control. Exchanges are no more than their flags here, which are raised at once when a
push begins: no real push raises them earlier. Memory is what
`extras.replication.transfers` says that no flag protects: rows that travel by
themselves and weights, which ranks write to each other, and gradients, which a rank writes to
memory of its own and all others read; weights and gradients of fc1 and of fc2 each. Checked is that

    nothing is written while what was there before is, or will be, read, and
    nothing is read that has not come.
"""

from collections import Counter
from typing import NamedTuple

from tests.parallel.dispatcher.protocol import Violation

FC1, FC2 = "weights fc1", "weights fc2"
OWN_FC1, OWN_FC2 = "gradients fc1", "gradients fc2"
OWN = (OWN_FC1, OWN_FC2)
"""Memory that its rank writes and all read; of others the rank reads its own, which all write."""


class Event(NamedTuple):
    """`number` is of an exchange, or says which contents a memory gets; `rank` is of another."""

    kind: str
    number: int
    what: str = ""
    rank: int = 0


class Program:
    """Commands of each rank's host to its streams.

    Args:
        ranks: R.
        overlaps: pushes and control have streams of their own.
    """

    def __init__(self, ranks: int, *, overlaps: bool) -> None:
        self.ranks = ranks
        self.compute: list[Event] = []
        self.streams = [self.compute, [], []] if overlaps else [self.compute]
        self._pushes = self.streams[:2][-1]
        self.calls: list[str] = []
        """Calls of the host, in its order."""
        self._started, self._contents = 0, Counter[str]()
        self._signals: dict[int, str] = {}
        """Name of the call that waits for an exchange."""
        self._met = 0

    def start(self, put: str = "") -> int:
        """Exchange after the work of its stream and of compute; its kernel also writes `put`."""
        u = self.begin()
        if put:
            self.calls.append(f"put {put}")
            self._put(put, self._pushes, self.ranks)
        return self._raise(u, self._pushes)

    def begin(self) -> int:
        """Exchange whose flags the compute stream raises later (`end`), as for sums under fc2."""
        self.calls.append("start")
        return self._begin(self._pushes)

    def end(self, u: int) -> None:
        self._raise(u, self.compute)

    def signal(self) -> int:
        """An exchange of control."""
        self.calls.append("signal")
        u = self._begin(self.streams[-1])
        self._signals[u] = "wait"
        return self._raise(u, self.streams[-1])

    def send_weights(self, *layers: str) -> list[int]:
        """Send weights of layers in the control stream, with flags for each."""
        self.calls.append("send weights")
        raised = []
        for layer in layers:
            u = self._begin(self.streams[-1])
            self._put(layer, self.streams[-1], self.ranks)
            self._signals[u] = "wait for replicas"
            raised.append(self._raise(u, self.streams[-1]))
        return raised

    def send_grads(self) -> int:
        """Flags that a kernel of the compute stream raises."""
        self._started += 1
        return self._raise(self._started, self.compute)

    def run_on_comm_stream(self) -> None:
        """Order the next work of the control stream after the compute stream's."""
        self._begin(self.streams[-1])

    def wait(self, u: int, *, beside: bool = False) -> None:
        """For its flags of all ranks; `beside` in the stream of control."""
        if u in self._signals:
            self.calls.append(self._signals[u])
        stream = self.streams[-1] if beside else self.compute
        stream.append(Event("wait", u))

    def put(self, what: str) -> None:
        """New contents for all ranks."""
        self.calls.append(f"put {what}")
        self._put(what, self.compute, 1 if what in OWN else self.ranks)

    def get(self, what: str, *, beside: bool = False) -> None:
        """Read what came last, of all ranks; `beside` in the stream of control."""
        if what not in (FC1, FC2):  # which experts read
            self.calls.append(f"get {what}")
        number, stream = self._contents[what], self.streams[-1] if beside else self.compute
        stream += [Event("get", number, what, r) for r in range(self.ranks)]

    def meet(self) -> None:
        """The stream of compute waits for that of control."""
        self._met += 1
        self.streams[-1].append(Event("met", self._met))
        self.compute.append(Event("meet", self._met))

    def world(self) -> "_World":
        """All ranks before the first event."""
        return _World(self)

    def _put(self, what: str, stream: list[Event], ranks: int) -> None:
        self._contents[what] += 1
        stream += [Event("put", self._contents[what], what, r) for r in range(ranks)]

    def _begin(self, stream: list[Event]) -> int:
        self._started += 1
        self.compute.append(Event("start", self._started))
        stream.append(Event("after", self._started))
        return self._started

    def _raise(self, u: int, stream: list[Event]) -> int:
        stream += [Event("raise", u, rank=r) for r in range(self.ranks)]
        return u


def forward(p: Program, *, overlaps: bool) -> None:
    """One layer."""
    p.wait(p.signal())  # routing
    tokens = p.start()
    first, second = p.send_weights(FC1, FC2)
    p.wait(first)
    p.wait(tokens)
    p.get(FC1)
    sums = p.begin() if overlaps else 0
    p.wait(second)
    p.get(FC2)
    _way_back(p, sums)


def way_back(p: Program) -> None:
    """Rows and sums of one layer alone, where pushes overlap."""
    _way_back(p, p.begin())


def _way_back(p: Program, sums: int) -> None:
    """`sums`: the exchange that has been begun; 0: it has not."""
    if sums:
        p.put("rows")
        p.end(sums)
    else:
        sums = p.start("rows")
    p.wait(sums)
    p.get("rows")


def backward(
    p: Program,
    *,
    overlaps: bool,
    keep: bool,
    fp8: bool = False,
    meets: bool = True,
    signal: bool = True,
) -> None:
    """Its gradients; weights are lent again unless they were kept.

    Args:
        fp8: rows travel in FP8: what has come of tokens is kept where nothing overlaps.
        meets: gradients of sums are waited for.
        signal: owners wait until replicas' gradients are complete.
    """
    grads, back = p.start(), 0
    if meets:
        p.wait(grads)
    if not keep:
        if overlaps or not fp8:
            p.start()  # tokens once more
        first, second = p.send_weights(FC2, FC1)
        p.wait(first)
        p.get(FC2)
        p.wait(second)
        p.get(FC1)
    if overlaps:
        back = p.start("rows")
    complete = []
    for what in OWN:
        p.put(what)
        complete.append(p.send_grads())
    p.run_on_comm_stream()
    if signal:
        p.wait(complete[0], beside=True)
    p.get(OWN_FC1, beside=True)
    p.meet()
    if signal:
        p.wait(complete[1])
    p.get(OWN_FC2)
    if not overlaps:
        back = p.start("rows")
    p.wait(back)
    p.get("rows")


class _World:
    """All ranks in the middle of a run."""

    def __init__(self, p: Program) -> None:
        self._ranks = p.ranks
        self._started = [0 for _ in range(p.ranks)]
        self._flags = set[tuple[int, int, int]]()  # exchange, at a rank, from another
        self._held: dict[tuple[str, int, int], int] = {}  # memory, its rank, writer
        gets = [e for stream in p.streams for e in stream if e.kind == "get"]
        self._met = [0 for _ in range(p.ranks)]
        self._unread = [Counter((e.what, e.rank, e.number) for e in gets) for _ in range(p.ranks)]

    def can(self, rank: int, event: Event) -> bool:
        if event.kind == "after":
            return self._started[rank] >= event.number
        if event.kind == "meet":
            return self._met[rank] >= event.number
        if event.kind == "wait":
            return all((event.number, rank, r) in self._flags for r in range(self._ranks))
        return True

    def do(self, rank: int, event: Event) -> None:
        kind, number, what, other = event
        if kind == "start":
            self._started[rank] = number
        elif kind == "met":
            self._met[rank] = number
        elif kind == "raise":
            self._flags.add((number, other, rank))
        elif kind == "put":
            at = rank if what in OWN else other
            readers = range(self._ranks) if what in OWN else (at,)
            for reader in readers:
                for before in range(1, number):
                    if self._unread[reader][what, rank, before]:
                        raise Violation(f"rank {rank} writes {what} that rank {reader} still reads")
            self._held[what, at, rank] = number
        elif kind == "get":
            at = other if what in OWN else rank
            if self._held.get((what, at, other), 0) != number:
                raise Violation(f"rank {rank} reads {what} that rank {other} has not written")
            self._unread[rank][what, other, number] -= 1
