"""Goodput of a run: the time that trained over the time that passed, and what the rest went to.

Rank 0 keeps the time of the host, from the start of the process on. Every moment is of one kind.
Each line of metrics.jsonl has the seconds so far under `seconds`, so that a resumed run goes on
with the sums of the launches before it; the time between launches, and from the last line of a
killed launch to its end, is in none of them.
"""

import time
from collections.abc import Iterable
from typing import Any

import psutil

from phalanx.parallel.fault.activity import startup_times

_SLOW_START = 60.0  # seconds of a start whose parts are worth a line
TRAINING = "training"  # steps that were applied, and never undone
UNDONE = "undone"  # steps that a rollback or a restart has undone: they are trained again
KINDS = {
    "start": "start of the process, up to the first step",
    "capture": "the first step, which compiles, and steps that captured a graph",
    "data": "waits for data",
    "reruns": "steps that were computed again, as experts had more tokens than rows",
    "skipped": "steps that were not applied, and rollbacks",
    UNDONE: "steps that a rollback or a restart has undone",
    "validation": "validation, and scores of tasks",
    "samples": "samples of text",
    "checkpoints": "checkpoints, as far as the run waits for them",
    "end": "what comes after the last step and its checkpoint",
}


class Clock:
    """Seconds of a run by kind, each moment in one of them.

    `earlier` are those of the launches before, and `until` the time of their last line: this one
    began with its process, or then if that is later.
    """

    def __init__(self, earlier: dict[str, float] | None = None, until: float = 0.0) -> None:
        self.seconds = dict(earlier or {})  # `TRAINING` and those of `KINDS` that took any
        began = max(psutil.Process().create_time(), min(until, time.time()))
        self._since = time.perf_counter() - (time.time() - began)

    def lap(self, kind: str, most: float | None = None) -> None:
        """Add the time since the last lap to a kind; what exceeds `most` is left to the next."""
        passed = time.perf_counter() - self._since
        if most is not None:
            passed = min(passed, most)
        self.seconds[kind] = self.seconds.get(kind, 0.0) + passed
        self._since += passed

    def undo(self, applied: float) -> None:
        """Count training after `applied` seconds of it, up to the step to return to, as undone."""
        self.seconds = undone(self.seconds, applied)

    def rounded(self) -> dict[str, float]:
        """Seconds by kind, to milliseconds, as a line of metrics.jsonl has them."""
        return {kind: round(value, 3) for kind, value in self.seconds.items()}


def undone(seconds: dict[str, float], applied: float) -> dict[str, float]:
    """`seconds` with all training beyond `applied` seconds counted as undone."""
    lost = max(0.0, seconds.get(TRAINING, 0.0) - applied)
    if not lost:
        return dict(seconds)
    changed = {TRAINING: seconds[TRAINING] - lost, UNDONE: seconds.get(UNDONE, 0.0) + lost}
    return seconds | changed


def trained_until(records: Iterable[dict[str, Any]], step: int) -> float:
    """Seconds of training up to a step, from the newest line of metrics.jsonl that is not later."""
    found = 0.0
    for record in records:
        if "seconds" in record and record.get("step", record.get("at", 0)) <= step:
            found = record["seconds"].get(TRAINING, 0.0)
    return found


def earlier(records: Iterable[dict[str, Any]], step: int) -> dict[str, float]:
    """Seconds of the launches before the one that resumes from `step`, by kind.

    The `records` are all lines of metrics.jsonl; step 0 is a new run's.
    """
    if not step:
        return {}
    lines = [record for record in records if "seconds" in record]
    return undone(lines[-1]["seconds"], trained_until(lines, step)) if lines else {}


def goodput(seconds: dict[str, float]) -> float:
    """Time that trained over the time that passed; 0 before any has."""
    passed = sum(seconds.values())
    return seconds.get(TRAINING, 0.0) / passed if passed else 0.0


def goodput_line(seconds: dict[str, float]) -> str:
    """`goodput 92.1% of 600 s; start 3.0%, checkpoints 2.0%`, the largest loss first."""
    passed = sum(seconds.values())
    lost = sorted(((s, kind) for kind, s in seconds.items() if kind != TRAINING), reverse=True)
    parts = [f"{kind} {s / passed:.1%}" for s, kind in lost if s >= passed / 1000]
    text = f"goodput {goodput(seconds):.1%} of {passed:,.0f} s"
    return f"{text}; {', '.join(parts)}" if parts else text


def slow_start() -> str:
    """Line on the parts of a start that took long; empty if it did not."""
    parts = sorted(startup_times().items(), key=lambda part: -part[1])
    if (whole := sum(seconds for _, seconds in parts)) < _SLOW_START:
        return ""
    longest = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts if seconds >= 0.1)
    return f"the start took {whole:.1f} s: {longest}"
