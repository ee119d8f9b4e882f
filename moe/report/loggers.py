"""metrics.jsonl: always written, it survives kills and resumes.

It cannot stop training: the first failure is reported once. `moe.report.trackers` has the others.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO


def read(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics.jsonl by step, each step once (with its validation loss, if it has one).

    Lines without a step (events, the summary) and half-written lines are left out. ValueError for a
    step that is no whole number.
    """
    steps: dict[int, dict[str, Any]] = {}
    for _, record in _lines(path):
        if record is not None and "step" in record:
            if not isinstance(step := record["step"], int):
                raise ValueError(f"{path} has a line of step {step!r}, no whole number: remove it")
            steps.setdefault(step, {}).update(record)
    return [steps[step] for step in sorted(steps)]


def lines(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl that are complete; empty without the file."""
    return [record for _, record in _lines(path) if record is not None] if path.exists() else []


def logged(path: Path) -> list[dict[str, Any]]:
    """Records of steps and validations as they were logged, NaN and infinity too, with `time`."""
    records = []
    for line in lines(path):
        if "step" in line:
            odd = {name: float(text) for name, text in line.get("nonfinite", {}).items()}
            known = {k: v for k, v in line.items() if k not in ("nonfinite", "seconds")}
            records.append(known | odd)
    return records


def is_finite(value: Any) -> bool:
    """True for a value that is a number; metrics.jsonl has null for NaN and infinity."""
    return isinstance(value, int | float) and math.isfinite(value)


def start_facts(path: Path) -> dict[str, Any]:
    """Facts of `title_facts` at the last start in a metrics.jsonl; empty if it has none."""
    starts = [record for _, record in _lines(path) if record and record.get("event") == "start"]
    facts = starts[-1] if starts else {}
    return {k: v for k, v in facts.items() if k not in ("event", "at", "time", "seconds")}


class Journal:
    """metrics.jsonl: one JSON object per line, on disk when `write` returns.

    Lines after the step that a run resumes from (0 for a new run) move to
    metrics.superseded.jsonl, so that a reader sees each step once. NaN and infinity are null, and
    named under `nonfinite`. `warn` is called once if the file can no longer be written; an OSError
    is raised if it cannot be from the start.
    """

    def __init__(self, path: Path, step: int, warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._torn = path, warn, False
        self._failed = False
        self.lost = 0  # records that could not be written
        self._file: TextIO | None = None
        self._open(step or -1)  # a new run keeps none, also no line of the start of an earlier one

    def _open(self, step: int) -> None:
        _drop_after(self._path, step)
        self._file = self._path.open("a", encoding="utf-8")

    def rewind(self, step: int) -> None:
        """Move records after `step`, to which the run returns, to the superseded ones."""
        try:
            self.close()
            self._open(step)
        except OSError as error:
            self._lose(error)

    def write(self, record: dict[str, Any]) -> None:
        """Append a record. A full disk costs the record, not the run."""
        odd = {
            k: str(v) for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)
        }
        record = {k: None if k in odd else v for k, v in record.items()}
        record |= {"nonfinite": odd} if odd else {}
        record |= {"time": record.get("time", round(time.time(), 3))}
        text = json.dumps(record, default=float) + "\n"
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write("\n" + text if self._torn else text)
            self._file.flush()
            self._torn = False
        except OSError as error:
            self._torn = True
            self.lost += 1
            self._lose(error)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # the buffer of a failed write
                file.close()

    def _lose(self, error: OSError) -> None:
        """Close the file until the next record reopens it, and warn the first time."""
        self.close()
        if not self._failed:
            self._warn(f"records are being lost, {self._path} cannot be written: {error}")
        self._failed = True


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """(line, record) of a jsonl; None for a line that is incomplete after a kill."""
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        record = None
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(text)
        yield text, record if isinstance(record, dict) else None


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept: list[str] = []
    superseded: list[str] = []
    for text, record in _lines(path):
        if record is not None:
            at = record.get("step", record.get("at", 0))
            (kept if at <= step else superseded).append(text + "\n")
    if superseded:
        with path.with_suffix(".superseded.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(superseded)
    new = path.with_suffix(".new")
    new.write_text("".join(kept), encoding="utf-8")
    os.replace(new, path)
