"""A metrics.jsonl that is read as it grows.

A run appends lines, and replaces the file by a shorter one where it goes back to a checkpoint or
begins again. A line without its end may still be written.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_READ = 1 << 24  # bytes at a time
_MARK = 256  # bytes before the place that was reached, by which the file is known again


class Journal:
    """Yields each line once; `rewritten` says that earlier ones no longer count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exists = False
        self._reached, self._mark, self._file = 0, b"", (0, 0)

    def rewritten(self) -> bool:
        """Whether the file is another one than that of the lines so far, which starts anew."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                self.exists = True
                same = (found.st_dev, found.st_ino) == self._file or not self._file[1]
                file.seek(self._reached - len(self._mark))
                same = same and file.read(len(self._mark)) == self._mark
                self._file = found.st_dev, found.st_ino
        except OSError:
            same, self.exists, self._file = not self._reached, False, (0, 0)
        if not same:
            self._reached, self._mark = 0, b""
        return not same

    def lines(self) -> Iterator[dict[str, Any]]:
        """New complete lines that are JSON objects, up to the end that the file has now."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_dev, found.st_ino) != self._file:
                    return  # replaced since `rewritten`, which tells it at the next call
                file.seek(self._reached)
                rest, before = b"", self._mark
                while block := file.read(_READ):
                    whole, end, rest = (rest + block).rpartition(b"\n")
                    for text in whole.split(b"\n") if end else ():
                        if (record := _object(text)) is not None:
                            yield record
                    before = (before + whole + end)[-_MARK:]
                self._reached, self._mark = file.tell() - len(rest), before
        except OSError:
            self.exists = False


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text, parse_int=_whole)
    except (ValueError, RecursionError):
        return None  # cut off by a kill or a full disk
    return record if isinstance(record, dict) else None


def _whole(digits: str) -> int:
    if abs(number := int(digits)) >= 1 << 63:
        raise ValueError("no run counts so far, and no table holds it")
    return number
