"""console.log in the run folder: everything that rank 0 printed, launch after launch.

Output still reaches the terminal; neither it nor the file gets secrets. Lines from before the run
folder may be written are buffered until then; later ones are in the file as soon as they are
printed. Other ranks print nothing unless they fail, so only their stderr is logged. A log that
cannot be written never stops a run.
"""

import errno
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from phalanx.configs.redact import redacted

NAME = "console.log"


class Console:
    """Logs the output of this process inside of `copied`."""

    def __init__(self, rank: int) -> None:
        self._main = rank == 0
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._early: list[str] = []
        self._lost = 0

    @contextmanager
    def copied(self) -> Iterator[None]:
        """Replace sys.stdout and sys.stderr by streams that also pass their lines to `line`."""
        before = sys.stdout, sys.stderr
        if self._main:
            sys.stdout = _Copied(sys.stdout, self)  # type: ignore[assignment]
        sys.stderr = _Copied(sys.stderr, self)  # type: ignore[assignment]
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            if self._file is not None:
                self._file.close()

    def keep(self, folder: Path, title: str) -> None:
        """Write this and later lines to the log of an existing run folder.

        Rank 0 starts with a title and the buffered lines, or raises OSError.
        """
        self._path = folder / NAME
        if self._main:
            self._append([f"==== {title}\n", *self._early])
        self._early = []

    def line(self, text: str) -> None:
        """Log a line that is being printed."""
        if self._path is not None:
            lines = f"{self._lost} line{'s' * (self._lost > 1)}"
            lost = [f"\n-- {lines} could not be written here\n"] if self._lost else []
            try:
                self._append([*lost, text])
                self._lost = 0
            except OSError:  # such as a full disk
                self._lost += 1
        elif self._main:
            self._early.append(text)

    def _append(self, lines: list[str]) -> None:
        """Append in one write, so that lines of threads, forks and ranks do not mix."""
        if self._file is None:
            assert self._path is not None
            self._file = self._path.open("ab", buffering=0)
        data = "".join(map(redacted, lines)).encode(errors="replace")
        if self._file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Copied:
    """A stream without secrets that also passes every complete line to a console."""

    def __init__(self, stream: TextIO, console: Console) -> None:
        self._stream, self._console = stream, console
        self._partial = threading.local()  # the watchdog's thread prints as well

    def write(self, text: str) -> int:
        *lines, self._partial.text = (getattr(self._partial, "text", "") + text).split("\n")
        for line in lines:
            self._console.line(line + "\n")
        self._stream.write(redacted(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def quiet() -> None:
    """Suppress notices that Megatron-Core and torch print at every start of every rank."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine)\b")
    for name in ("megatron", "torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
