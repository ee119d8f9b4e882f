"""Which rank brought the job down: rules over what rank 0 has heard from all of them.

No sockets and no clock here; parallel.fault.watchdog brings both.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phalanx.configs.redact import redacted

SETTLE = 0.5  # seconds after the first bad news in which the others' news still come in
AGREED = 2.0  # the same after an error that all ranks may have raised, one later than another
QUIET = 1.0  # seconds without a heartbeat after which a rank is not well


@dataclass(frozen=True)
class Where:
    """A rank's process."""

    rank: int
    host: str
    pid: int
    born: float  # when the process began, in seconds since the epoch

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass
class Member:
    """A rank as rank 0 knows it. Times are rank 0's clock, in seconds; None is never."""

    where: Where
    heard: float  # last message
    at: str = "start"  # activity, as are the next two: see `parallel.fault.activity`
    serial: int = 0
    since: float = 0.0
    limited: bool = False
    gone: float | None = None  # its connection ended without a word: the process is dead
    failed: float | None = None  # it said that it cannot go on
    own: bool = False  # true if it failed by its own error rather than by a broken collective
    reason: str = ""  # why, in a line
    left: bool = False  # it said that it is done

    @property
    def bad(self) -> float | None:
        return self.failed if self.gone is None else self.gone


@dataclass(frozen=True)
class Verdict:
    """Culprit, and the sentence that names it."""

    where: Where
    kind: str
    """`failed` (raised; tells it itself), `died`, `silent`, `stuck`, or `broken` (no one's)."""
    text: str


def blame(members: Mapping[int, Member], now: float, timeout: float) -> Verdict | None:
    """The rank that is at fault, or None while all is well or too little is known.

    `timeout`: seconds without a sign of life, or without progress, that are too many.
    """
    here = {rank: m for rank, m in members.items() if not m.left}
    bad = {rank: m.bad for rank, m in here.items() if m.bad is not None}
    causes = {rank: at for rank, at in bad.items() if here[rank].own or here[rank].gone is not None}
    lone = causes and all(here[rank].own for rank in causes)
    if bad and now - min(bad.values()) < (AGREED if lone else SETTLE) and len(bad) < len(here):
        return None
    if causes:
        # An error that all ranks agreed on is rank 0's to tell; otherwise the first was the cause.
        everywhere = len(causes) == len(here) and all(m.own for m in here.values())
        m = here[min(causes) if everywhere else min(causes, key=lambda rank: causes[rank])]
        if m.gone is not None:
            return Verdict(m.where, "died", died(m.where, m.at))
        reason = f": {m.reason}" if m.reason else ""
        return Verdict(m.where, "failed", f"{m.where} failed in {m.at}{reason}")
    if not here:
        return None
    m = min(here.values(), key=lambda m: m.heard)
    silence = now - m.heard
    # What a rank does began before its last sign of life: a stopped one seems to hang first.
    amiss = bad or any(m.limited and now - m.since >= timeout for m in here.values())
    if silence >= (QUIET if amiss else timeout):
        return Verdict(m.where, "silent", silent(m.where, silence, m.at))
    # A rank that stopped when the first collective broke has to have been quiet for long enough.
    if amiss and (not bad or now - min(bad.values()) >= SETTLE + QUIET):
        return _behind(here, now)
    return None


def error_line(text: str, folder: Path) -> str:
    """Line, without secrets, that tells the user a verdict and the folder of the post-mortem."""
    return redacted(f"error: {text}; stacks and collectives of the ranks: {folder}")


def died(where: Where, at: str) -> str:
    """Message about a rank that is gone."""
    return f"{where} died; it was last heard of in {at}"


def silent(where: Where, seconds: float, at: str) -> str:
    """Message about a rank without heartbeats."""
    lost = f"has not answered for {seconds:.1f} s, so it is stopped or its host is gone"
    return f"{where} {lost}; it was last heard of in {at}"


def _behind(here: Mapping[int, Member], now: float) -> Verdict:
    """Collectives do not finish though all ranks live: the one that is behind keeps them.

    A rank that says that it cannot go on does not hang; if all but one say so, they wait for that
    one. What the first of them said tells more.
    """
    failed = sorted((m.failed, m.reason) for m in here.values() if m.failed is not None)
    reason = f"; {failed[0][1]}" if failed and failed[0][1] else ""
    waiting = [m for m in here.values() if m.failed is None] or list(here.values())
    m = min(waiting, key=lambda m: (m.serial, m.since))
    alone = len(failed) == len(here) - 1
    if alone or m.serial < max(other.serial for other in here.values()):
        return Verdict(
            m.where, "stuck", f"{m.where} hangs, {now - m.since:.1f} s in {m.at}{reason}"
        )
    return Verdict(m.where, "broken", f"all ranks are stuck in {m.at}{reason}")
