"""Model of the one-sided exchanges of `parallel.dispatcher.symm`: events on streams.

Events come in any order that the streams allow.

Every rank runs the same program on two streams, one for compute and one for pushes. A stream takes
its events one by one; which stream is next is drawn at random, with speeds that differ and change.
Each event is at once: a copy, a read or a flag that takes time is one that comes early or late.
Checked is what the caller of `kernels.sm90.exchange.push` has to see to:

    no place is written while what it brought before is, or will be, read,
    nothing is read that has not come, and
    every stream ends.

Not in the model: how SMs are shared, the order of memory accesses of one event, timeouts.
"""

import random
from collections import Counter
from typing import Any, NamedTuple

from phalanx.kernels.sm90.exchange.peer_buffers import SLOTS, WAVES


class Violation(Exception):
    """A violated invariant, or a stream that waits for ever."""


class Event(NamedTuple):
    """`exchange` counts from 1; part 0 is the side data, then come waves."""

    kind: str
    exchange: int
    part: int = 0
    target: int = 0


class Program:
    """Commands of each rank's host to its streams; calls are those of `Exchange`."""

    def __init__(self, ranks: int, *, overlaps: bool = True, slots: int = SLOTS) -> None:
        self.ranks, self.overlaps, self.slots = ranks, overlaps, slots
        self.compute: list[Event] = []
        self.comm: list[Event] = [] if overlaps else self.compute
        self.streams = [self.compute, self.comm] if overlaps else [self.compute]
        self.parts, self.places = [0], [-1]
        """Waves and place of each exchange; they count from 1."""
        self.calls: list[tuple[str, int, int]] = []
        """Starts, waits and reads in the order of the host, with exchange and part."""
        self._next = 0
        self._begun = 0

    def start(self, *, back: bool = False) -> int:
        """Push an exchange, after what compute has been given so far. Returns its number."""
        waves = WAVES if self.overlaps and not back else 1
        u = len(self.parts)
        self.parts.append(waves)
        self.places.append(self._next)
        self._next = (self._next + 1) % self.slots
        self._note("start", u, waves)
        self.compute.append(Event("start", u))
        everyone = range(self.ranks)
        self.comm.append(Event("after", u))
        self.comm += [Event("allow", u + 1, target=r) for r in everyone]
        self.comm.append(Event("allowed", u))
        for part in range(waves + 1):
            self.comm += [Event("write", u, part, r) for r in everyone]
            self.comm += [Event("publish", u, part, r) for r in everyone]
        self.comm.append(Event("pushed", u))
        return u

    def wait(self, u: int, *, side_only: bool = False) -> None:
        """Wait for an exchange, or its side data, from all ranks."""
        part = 0 if side_only else self.parts[u]
        self._note("wait", u, part)
        self.compute.append(Event("wait", u, part))
        if not side_only:
            self.compute.append(Event("own", u))

    def wait_running(self, u: int) -> None:
        """Wait until this rank's push has sent its side data."""
        self._note("running", u, 0)
        self.compute.append(Event("running", u))

    def read(self, u: int, *, waiting: bool = False) -> None:
        """A kernel reads an exchange, `waiting` for each wave of the one that was waited for last.

        Without, also its side data.
        """
        self._note("read", u, 0)
        kind = "read in waves" if waiting else "read"
        self.compute += [Event(kind, u, part) for part in range(waiting, self.parts[u] + 1)]

    def begin(self, *, meet: bool = True) -> None:
        """A graph is replayed: all ranks meet, and places are taken from the first one again."""
        self._begun += 1
        self._next = 0
        if meet:
            self.compute += [Event("come", self._begun), Event("met", self._begun)]

    def world(self) -> "_World":
        """All ranks before the first event."""
        return _World(self)

    def _note(self, kind: str, u: int, part: int) -> None:
        if (kind, u, part) not in self.calls[-1:]:
            self.calls.append((kind, u, part))


def forward(program: Program, *, overlaps: bool, keep: bool) -> None:
    """Forward pass of a layer over `symm`; with `overlaps` pushes overlap the experts."""
    x = program.start()
    if overlaps:
        program.wait(x, side_only=True)
        program.read(x, waiting=True)  # fc1; the plan's side data came before
        program.wait(x)
        if keep:
            program.read(x)
    else:
        program.wait(x)
        program.read(x)
    out = program.start(back=True)
    program.wait(out)
    program.read(out)


def backward(program: Program, *, overlaps: bool, keep: bool) -> None:
    """The same layer's gradients; unless `keep`, its tokens are sent again."""
    dout, x = program.start(), 0
    program.wait(dout, side_only=overlaps)
    if not keep:
        x = program.start()
    if overlaps:
        program.read(dout, waiting=True)  # gradients of activations and tokens
        program.wait(dout)
        dx = program.start(back=True)
        program.wait_running(dx)
        program.read(dout)  # gradient of fc2's weights
        if x:
            program.wait(x)
            program.read(x)  # of fc1's
    else:
        if x:
            program.wait(x)
        program.read(dout)
        if x:
            program.read(x)
        dx = program.start(back=True)
    program.wait(dx)
    program.read(dx)


def step(program: Program, layers: int, *, overlaps: bool, keep: bool) -> None:
    """Forward and backward of a micro-batch."""
    for _ in range(layers):
        forward(program, overlaps=overlaps, keep=keep)
    for _ in range(layers):
        backward(program, overlaps=overlaps, keep=keep)


class _World:
    """All ranks in the middle of a run."""

    def __init__(self, program: Program) -> None:
        self._program, ranks = program, range(program.ranks)
        self._flags: Counter[tuple[int, int, int]] = Counter()  # rank, part, source
        self._allowed = {(rank, source): 1 for rank in ranks for source in ranks}
        self._seen, self._come = [0 for _ in ranks], [0 for _ in ranks]
        self._started, self._pushed = [0 for _ in ranks], [0 for _ in ranks]
        self._held: dict[tuple[int, int, int, int], int] = {}  # rank, place, source, part
        reads = [e.exchange for e in program.compute if e.kind.startswith("read")]
        self._unread = [Counter(reads) for _ in ranks]

    def can(self, rank: int, event: Event) -> bool:
        """The event need not wait any longer."""
        kind, u, part, _ = event
        everyone = range(self._program.ranks)
        if kind == "after":
            return self._started[rank] >= u
        if kind == "allowed":
            return all(self._allowed[rank, source] >= u for source in everyone)
        if kind == "own":
            return self._pushed[rank] >= u
        if kind == "running":
            return self._flags[rank, 0, rank] >= u
        if kind == "met":
            return min(self._come) >= u
        if kind in ("wait", "read in waves"):
            epoch = u if kind == "wait" else self._seen[rank]
            return all(self._flags[rank, part, source] >= epoch for source in everyone)
        return True

    def do(self, rank: int, event: Event) -> None:
        """Let the event happen."""
        kind, u, part, target = event
        if kind == "start":
            self._started[rank] = u
        elif kind == "allow":
            self._allowed[target, rank] = u
        elif kind == "write":
            self._write(rank, event)
        elif kind == "publish":
            self._flags[target, part, rank] = u
        elif kind == "pushed":
            self._pushed[rank] = u
        elif kind == "wait":
            self._seen[rank] = u
        elif kind == "come":
            self._come[rank] = u
        elif kind.startswith("read"):
            self._read(rank, event)

    def _write(self, rank: int, event: Event) -> None:
        _, u, part, target = event
        places = self._program.places
        for before in range(1, u):
            if places[before] == places[u] and self._unread[target][before]:
                raise Violation(
                    f"rank {rank} writes exchange {u} to rank {target}, which still reads "
                    f"exchange {before} in place {places[u]}"
                )
        self._held[target, places[u], rank, part] = u

    def _read(self, rank: int, event: Event) -> None:
        _, u, part, _ = event
        for source in range(self._program.ranks):
            found = self._held.get((rank, self._program.places[u], source, part), 0)
            if found != u:
                raise Violation(
                    f"rank {rank} reads part {part} of exchange {u} of rank {source}, but finds "
                    f"exchange {found}"
                )
        self._unread[rank][u] -= 1


def run(program: Any, seed: int) -> None:
    """One order of events, drawn at random.

    Args:
        program: `ranks`, `streams` of events of each rank, and `world()`, whose `can` tells whether
            an event may happen and whose `do` lets it happen.
        seed: of the order.

    Raises:
        Violation: with the first thing that must not happen.
    """
    draw, world = random.Random(seed), program.world()
    streams = [(rank, iter(events)) for rank in range(program.ranks) for events in program.streams]
    heads = {i: event for i, (_, events) in enumerate(streams) if (event := next(events, None))}
    speeds: list[float] = []
    while heads:
        if not speeds or draw.random() < 0.02:
            speeds = [10 ** draw.uniform(-3, 0) for _ in streams]
        ready = [i for i, event in heads.items() if world.can(streams[i][0], event)]
        if not ready:
            waiting = ", ".join(f"rank {streams[i][0]} for {heads[i]}" for i in heads)
            raise Violation(f"deadlock: {waiting}")
        (i,) = draw.choices(ready, [speeds[i] for i in ready])
        rank, events = streams[i]
        world.do(rank, heads.pop(i))
        if event := next(events, None):
            heads[i] = event


def explore(program: Any, runs: int) -> None:
    """`run` with as many seeds."""
    for seed in range(runs):
        run(program, seed)
