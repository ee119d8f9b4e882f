"""Broken rows of an input, which give no document: their location and the limit on their number.

By default prepare_data fails at the first one. With `--skip-bad` they are left out, counted, and
listed in a file next to the data.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.packed_files import opened

ROW = -1  # `Bad.start` of a row of a Parquet file, which has no lines


@dataclass(frozen=True)
class Bad:
    """A broken row."""

    path: str
    start: int  # byte offset at which `number` starts to count
    number: int  # first line of the row, or row of a Parquet file, from 1; 0 for a complete file
    reason: str  # kind of fault, by which bad rows are counted
    detail: str = ""

    def place(self) -> str:
        """path:line, or path: row N. Reads the file up to `start` to count its lines."""
        if self.start == ROW:
            return f"{self.path}: row {self.number}"
        if not self.number:
            return self.path
        return f"{self.path}:{_lines_before(self.path, self.start) + self.number}"

    def __str__(self) -> str:
        return f"{self.place()}: {self.reason}{self.detail}"


class BadRow(DataError):
    """An input has a broken row, and none may be left out."""


class TooManyBad(DataError):
    """An input has more broken rows than may be left out; finished shards are kept."""


@dataclass(frozen=True)
class Limit:
    """Number of broken rows that may be left out: `--skip-bad`."""

    text: str
    count: int | None  # none if a share is set
    share: float = 0.0

    @staticmethod
    def read(text: str) -> "Limit":
        """Parse `100` or `0.1%`. Raises DataError."""
        if re.fullmatch(r"\d{1,18}", text):
            return Limit(text, int(text))
        if re.fullmatch(r"\d{1,3}(\.\d+)?%", text) and float(text[:-1]) <= 100:
            return Limit(text, None, float(text[:-1]) / 100)
        raise DataError(f"--skip-bad {text} is neither a count, as 100, nor a share, as 0.1%")

    def check(self, bad: list[Bad], rows: int | None = None) -> None:
        """Raise if there are more bad rows than allowed; a share is checked once `rows` is known.

        Raises:
            BadRow: none may be left out.
            TooManyBad: some may be left out, but fewer.
        """
        if self.allows(len(bad), rows):
            return
        if self.count == 0:
            raise BadRow(f"{bad[0]}; fix it, or leave such rows out with --skip-bad N")
        of = "" if rows is None else f" of {rows:,}"
        raise TooManyBad(
            f"{len(bad):,} bad rows{of} are more than --skip-bad {self.text}: {summary(bad)}; fix "
            "them, or continue with a higher --skip-bad"
        )

    def allows(self, bad: int, rows: int | None) -> bool:
        if self.count is not None:
            return bad <= self.count
        return rows is None or bad <= self.share * rows


def by_reason(bad: Iterable[Bad]) -> dict[str, list[Bad]]:
    """Bad rows by reason, the most frequent reason first."""
    reasons: dict[str, list[Bad]] = {}
    for each in bad:
        reasons.setdefault(each.reason, []).append(each)
    return dict(sorted(reasons.items(), key=lambda item: -len(item[1])))


def summary(bad: Iterable[Bad]) -> str:
    """Counts by reason, each with the first location."""
    return ", ".join(
        f"{len(some):,} {reason} (first {some[0].place()})"
        for reason, some in by_reason(bad).items()
    )


def listing(bad: Iterable[Bad]) -> Iterable[str]:
    """A line for each: location, tab, fault. `bad` are in the order of the input."""
    path, offset, lines = "", 0, 0
    for each in bad:
        place = each.place() if each.start <= 0 else ""
        if not place:  # count the lines of a file once, not for each of its bad rows
            if path != each.path or each.start < offset:
                path, offset, lines = each.path, 0, 0
            lines += _lines_before(path, each.start, offset)
            offset = each.start
            place = f"{path}:{lines + each.number}"
        yield f"{place}\t{each.reason}{each.detail}\n"


def _lines_before(path: str, stop: int, start: int = 0) -> int:
    """Number of lines that start at bytes [start, stop) of a file."""
    if stop == start:
        return 0
    lines, left = int(start == 0), stop - start - int(start == 0)
    with opened(path) as stream:
        stream.seek(max(0, start - 1))
        while left > 0 and (block := stream.read(min(left, 1 << 22))):
            lines += block.count(b"\n")
            left -= len(block)
    return lines
