"""One run as the page shows it: curves, events, and where it stands."""

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from phalanx.extras.watching.events import event_of, failures
from phalanx.extras.watching.journal import Journal
from phalanx.extras.watching.table import Table, size_of
from phalanx.moe.report.goodput import TRAINING, goodput
from phalanx.moe.report.loggers import is_finite
from phalanx.scripts.output.pictures import title

_PACE_OF = 100  # newest records of the launch that give the pace
_LEAST_WAIT = 30.0  # seconds without a record that are never too long
_START_WAIT = 900.0  # for the first record of a launch, which may compile
_MOST_EVENTS = 2000  # that a page gets, the newest
_generations = itertools.count(1)  # of all runs: a restarted server has others than this one


class Run:
    """A run in a folder, read again at each `look`; may be used by several threads."""

    def __init__(self, path: Path) -> None:
        """The `path` is that of metrics.jsonl, which need not exist yet."""
        self.path, self._journal, self._lock = path, Journal(path), threading.Lock()
        self._plan = _Plan(path.with_name("config.yaml"))
        self._begin()

    def _begin(self) -> None:
        self._generation = _new_generation()
        self._table, self._events = Table(), list[dict[str, Any]]()
        self._version = 0  # lines so far
        self._facts: dict[str, Any] = {}
        self._seconds: dict[str, float] = {}
        self._first = 0  # row with which the newest launch begins
        self._newest: float | None = None  # time of the newest line
        self._launched = self._ended = False  # whether a launch is told to have begun, and ended

    def look(
        self,
        have: tuple[str, int, int, int, int] | None = None,
        window: tuple[int | None, int | None] = (None, None),
    ) -> dict[str, Any]:
        """Read the file, and return the news for a page.

        Args:
            have: what the page has by the last reply: its `have`; None for nothing.
            window: first and last step that the page shows.

        Returns:
            `state`, `events` from number `known` on, and `have` for the next call. Without news
            no more; else `points` of `Table.points`, which follow those up to the step before
            `since`, or replace all if it is None.
        """
        with self._lock:
            self._read()
            table, now = self._table, time.time()
            low, high = table.rows(*window)
            size = size_of(high - low)
            generation, had_size, version, row, known = have or ("", 0, -1, 0, 0)
            same = generation == self._generation
            known = known if same else 0
            newest = max(low, high - 1)
            reply: dict[str, Any] = {
                "state": self._state(now),
                "known": known,
                "events": self._events[known:][-_MOST_EVENTS:],
                "failures": failures(self.path.parent),
                "have": [self._generation, size, self._version, newest, len(self._events)],
            }
            if not same or version != self._version or had_size != size:
                follow = same and had_size == size and low <= row < high
                first = max(low, row // size * size) if follow else low
                reply["since"] = table.steps[first] if follow else None
                reply["points"] = table.points(first, high, size)
            return reply

    def _read(self) -> None:
        if self._journal.rewritten():
            self._begin()
        for record in self._journal.lines():
            self._version += 1
            self._add(record)

    def _add(self, record: dict[str, Any]) -> None:
        when = record.get("time")
        self._newest = when if isinstance(when, int | float) else self._newest
        if isinstance(seconds := record.get("seconds"), dict):
            self._seconds = {kind: s for kind, s in seconds.items() if is_finite(s)}
        if isinstance(record.get("step"), int):
            self._ended = False
            if self._table.add(record):
                self._generation = _new_generation()
                self._first = min(self._first, len(self._table.steps) - 1)
        elif isinstance(record.get("event"), str):
            unended = self._launched and not self._ended
            self._events.append(event_of(record, title(record), unended=unended))
            if record["event"] == "start":
                self._facts, self._launched = record, True
                self._first = len(self._table.steps)
            self._ended = record["event"] == "summary"

    def _state(self, now: float) -> dict[str, Any]:
        """State of the run: `phase` is a word, the others are numbers for its head line."""
        table, (phases, planned) = self._table, self._plan.read()
        step = table.steps[-1] if table.steps else 0
        age = None if self._newest is None else max(0.0, now - self._newest)
        pace, wait = self._pace()
        left = None if planned is None else max(0, planned - step)
        eta = left * pace if left and pace else None
        following = self._following(phases, left) if self._ended else None
        phase = "running"
        if following is not None:
            phases = [*(each for each in phases if each != following), following]
            wait = _START_WAIT
            phase = "overdue" if age is not None and age > wait else "starting"
        elif self._ended:
            phase = "ended" if left is None or not left else "stopped"
        elif not self._version:
            phase = "not begun"
        elif age is not None and age > wait:
            phase = "overdue"
        elif len(table.steps) == self._first:
            phase = "starting"
        return {
            **{"phase": phase, "step": step, "steps": planned, "phases": phases},
            **{"eta": None if self._ended else eta, "pace": pace, "age": age, "wait": wait},
            **{"title": title(self._facts), "unit": _unit(self._facts)},
            **{"seconds": self._seconds, "training": TRAINING},
            **{"goodput": goodput(self._seconds), "newest": table.newest()},
            "tokens": next((n for n in reversed(table.tokens) if n == n), None),
        }

    def _following(self, phases: list[str], left: int | None) -> str | None:
        """The phase that begins by itself after the launch that has ended; None if none does.

        It is written to config.yaml before its first line is to metrics.jsonl.
        """
        after = self._facts.get("phases_after")
        if not isinstance(after, list) or not after:
            return None
        return str(after[0]) if left == 0 or phases[-1:] == after[:1] else None

    def _pace(self) -> tuple[float | None, float]:
        """Seconds a step of the newest records, and those without a record that are too long."""
        times = np.array(self._table.times[self._first :])
        steps = np.array(self._table.steps[self._first :])[np.isfinite(times)]
        times = times[np.isfinite(times)]
        gaps = np.diff(times)
        if not len(gaps):
            return None, _START_WAIT
        recent = slice(-_PACE_OF, None)
        pace = np.ptp(times[recent]) / np.ptp(steps[recent])
        # A validation or a checkpoint takes longer than a step, and may again.
        wait = max(_LEAST_WAIT, 10 * float(np.median(gaps[recent])), 2 * float(gaps.max()))
        return float(pace), wait


class _Plan:
    """Names of the phases up to this one, and the last step, by the newest config.yaml."""

    def __init__(self, path: Path) -> None:
        self._path, self._of = path, -1.0
        self._read: tuple[list[str], int | None] = [], None

    def read(self) -> tuple[list[str], int | None]:
        try:
            if (changed := self._path.stat().st_mtime) != self._of:
                run = yaml.safe_load(self._path.read_text("utf-8"))["run"]
                names = [str(each["name"]) for each in run.get("phases") or []]
                self._read, self._of = (names, int(run["steps"])), changed
        except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError):
            self._read, self._of = ([], None), -1.0
        return self._read


def _new_generation() -> str:
    return f"{int(time.time())}-{next(_generations)}"


def _unit(facts: dict[str, Any]) -> str:
    return "rank" if facts.get("device", "CPU process") == "CPU process" else "GPU"
