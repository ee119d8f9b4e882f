"""Results: a table on stdout, and a JSON file with a line per result."""

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from phalanx.parallel.checkpoint.commit import try_to_write
from phalanx.scripts.cluster.facts import facts

_DIGITS = {"ms": 4, "p10": 4, "p90": 4, "tflops": 1, "gbs": 1, "ratio": 4, "bar": 4, "goal": 4}


@dataclass(frozen=True)
class Record:
    """One result, or why there is none."""

    suite: str
    shape: tuple[int, ...]
    side: str  # implementation or condition that was measured
    pass_name: str  # pass or operation
    mode: str = "graph"
    """`graph`: replays of a CUDA graph. `eager`: including host time. `host`: host time alone."""
    ms: float | None = None  # median; p10 and p90 are the spread of the rounds
    p10: float | None = None
    p90: float | None = None
    tflops: float | None = None
    ratio: float | None = None
    bar: float | None = None
    goal: float | None = None
    note: str = ""
    failed: bool = False  # an error or a wrong result, not a missed bar
    gbs: float | None = None  # gigabytes per second that left a GPU
    ranks: tuple[float, ...] = ()
    """Medians of all ranks that measured together; `ms` is the largest."""

    @property
    def met(self) -> bool | None:
        """True if the bar was reached; None without a bar."""
        if self.ratio is None or self.bar is None:
            return None
        return self.ratio >= self.bar

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        if self.met is None or self.ratio is None:
            return ""
        if self.met and self.goal is not None and self.ratio >= self.goal:
            return "goal"
        return "met" if self.met else "missed"


def to_json(facts: dict[str, Any], records: Iterable[Record]) -> str:
    """Text of the JSON file; empty fields are left out."""

    def text(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"))

    lines = []
    for record in records:
        fields = asdict(record) | {"met": record.met}
        fields = {
            "pass" if k == "pass_name" else k: round(v, _DIGITS[k]) if k in _DIGITS else v
            for k, v in fields.items()
            if v is not None and (v or k not in ("note", "failed", "ranks"))
        }
        lines.append(text(fields))
    body = ",\n".join(lines)
    return f'{{"facts":{text(facts)},\n"records":[\n{body}\n]}}\n'


def write(path: Path, facts: dict[str, Any], records: Iterable[Record]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(to_json(facts, records))
    temporary.replace(path)


def read(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Facts and records of such a file; ValueError if it is not one."""
    try:
        content = json.loads(path.read_text())
        for line in content["records"]:
            line |= dict(shape=tuple(line["shape"]), ranks=tuple(line.get("ranks", ())))
            line["pass_name"] = line.pop("pass")
            line.pop("met", None)
        return content["facts"], [Record(**line) for line in content["records"]]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a file of this script: {error}") from error


def shape_text(shape: Sequence[int]) -> str:
    return ",".join(str(size) for size in shape)


def table(records: Sequence[Record]) -> str:
    """The printed table: a block for each suite and shape."""
    out = []
    for (suite, shape), group in groupby(records, key=lambda r: (r.suite, r.shape)):
        out.append(f"\n{suite} {shape_text(shape)}".rstrip())
        out.append(
            f"  {'side':<26}{'pass':<24}{'mode':<7}{'ms':>9}{'p10':>9}{'p90':>9}"
            f"{'TFLOP/s':>9}{'ratio':>8}{'bar':>8}{'goal':>8}"
        )
        out.extend(_line(record) for record in group)
    return "\n".join(out)


def _line(r: Record) -> str:
    def cell(value: float | None, width: int, digits: int) -> str:
        return f"{'' if value is None else format(value, f'.{digits}f'):>{width}}"

    times = "".join(cell(value, 9, 4) for value in (r.ms, r.p10, r.p90))
    rates = cell(r.tflops, 9, 1) + "".join(cell(value, 8, 3) for value in (r.ratio, r.bar, r.goal))
    rate = "" if r.gbs is None else f"{r.gbs:.0f} GB/s"
    remarks = "  ".join(part for part in (r.verdict, rate, r.note) if part)
    return f"  {r.side:<26}{r.pass_name:<24}{r.mode:<7}{times}{rates}  {remarks}".rstrip()


def summary(records: Sequence[Record]) -> str:
    """One line with the numbers of bars met, bars missed and failures."""
    judged = [r for r in records if r.met is not None]
    met, failed = sum(r.met is True for r in judged), sum(r.failed for r in records)
    return f"{met} of {len(judged)} bars met, {len(judged) - met} missed, {failed} failures"


class Report:
    """Collects records; the first rank shows and writes them as they come."""

    def __init__(self, path: Path | None, run_facts: dict[str, Any], *, shown: bool = True) -> None:
        self.records: list[Record] = []
        self.facts, self.shown, self._path = run_facts, shown, path

    def start(self) -> None:
        """Print the facts of the run; SystemExit with a line if no results can be written."""
        if self.shown and self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                try_to_write(self._path.parent)
            except OSError as error:
                sys.exit(f"--json {self._path} cannot be written: {error.strerror or error}")
        if self.shown:
            print(facts_line(self.facts))

    def add(self, records: list[Record], title: str = "") -> None:
        self.records += records
        if self.shown:
            print(f"\n{title}{table(records)}" if title else table(records), flush=True)
        self._save()

    def finish(self, device: torch.device) -> int:
        """Store the facts after the run and print the summary; returns the exit code."""
        self.facts |= facts(device, [], after=True)
        self._save()
        if self.shown:
            print(f"\n{summary(self.records)}")
        return 1 if any(r.failed for r in self.records) else 0

    def _save(self) -> None:
        if self.shown and self._path is not None:
            write(self._path, self.facts, self.records)


def show(path: Path) -> int:
    """Print table and summary of earlier results; returns the exit code."""
    try:
        run_facts, records = read(path)
    except (OSError, ValueError) as error:
        print(f"--from-json: {error}", file=sys.stderr)
        return 1
    print(facts_line(run_facts), table(records), f"\n{summary(records)}", sep="\n")
    return 0


def facts_line(run_facts: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in run_facts.items() if isinstance(v, str))
