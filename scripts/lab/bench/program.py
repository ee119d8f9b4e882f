"""The part that the benchmark scripts share: collecting, showing and storing records."""

import sys
from pathlib import Path
from typing import Any

from phalanx.parallel.checkpoint.commit import try_to_write
from phalanx.scripts.cluster.facts import facts
from phalanx.scripts.lab.bench.records import Record, plot, read, summary, table, write
from phalanx.scripts.lab.bench.timing import Bench


class Report:
    """Collects records; the first rank shows and writes them as they come."""

    def __init__(self, path: Path | None, run_facts: dict[str, Any], *, shown: bool = True) -> None:
        self.records: list[Record] = []
        self.facts, self.shown, self._path = run_facts, shown, path

    def start(self) -> None:
        """Print the facts of the run; SystemExit with a line if no results can be written."""
        if not self.shown:
            return
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                try_to_write(self._path.parent)
            except OSError as error:
                sys.exit(f"--json {self._path} cannot be written: {error.strerror or error}")
        print(_line(self.facts))

    def add(self, records: list[Record], title: str = "") -> None:
        """Show and store further records."""
        self.records += records
        if self.shown:
            print(f"\n{title}{table(records)}" if title else table(records), flush=True)
        self.save()

    def save(self) -> None:
        if self.shown and self._path is not None:
            write(self._path, self.facts, self.records)

    def finish(self, bench: Bench, picture: Path | None) -> int:
        """Store the facts after the run and print the summary; returns the exit code."""
        self.facts |= facts(bench.clock.device, [], after=True)
        self.save()
        if self.shown:
            _conclude(self.records, self.facts, picture)
        return 1 if any(r.failed for r in self.records) else 0


def show(path: Path, picture: Path | None) -> int:
    """Print table and summary of earlier results, and plot them."""
    try:
        run_facts, records = read(path)
    except (OSError, ValueError) as error:
        print(f"--from-json: {error}", file=sys.stderr)
        return 1
    print(_line(run_facts))
    print(table(records))
    return 1 if _conclude(records, run_facts, picture) else 0


def _conclude(records: list[Record], run_facts: dict[str, Any], picture: Path | None) -> str:
    print(f"\n{summary(records)}")
    problem = plot(picture, records, run_facts) if picture else ""
    print(problem, file=sys.stderr, end="\n" if problem else "")
    return problem


def _line(run_facts: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in run_facts.items() if isinstance(v, str))
