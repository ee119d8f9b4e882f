"""Progress of what takes long: a bar on a terminal, a line now and then in a file or a pipe.

A bar is redrawn over itself, which a file keeps as one line without end.
"""

import sys
from typing import Any

from tqdm import tqdm

_EVERY = 10
"""Seconds between two lines; before the first one as well, so that what is short has none."""


class _Lines:
    """stderr that is no terminal: what a bar draws over is a line of its own."""

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            print(text, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


def progress(what: str, **options: Any) -> Any:
    """A bar on stderr; where that is no terminal, a line every ten seconds from the tenth on.

    Args:
        what: is done.
        options: of tqdm.
    """
    if not sys.stderr.isatty():
        options |= {"file": _Lines(), "delay": _EVERY, "mininterval": _EVERY, "ncols": 80}
    return tqdm(desc=what, **options)
