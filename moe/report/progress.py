"""Progress of long operations: a bar on a terminal, a line every few seconds in a file or pipe."""

import sys
from typing import Any

from tqdm import tqdm

_EVERY = 10  # seconds between lines, and before the first one: short operations print none


class _Lines:
    """stderr that is no terminal: each update of a bar is a separate line."""

    def write(self, text: str) -> None:
        if text := text.strip("\r\n "):
            print(text, file=sys.stderr, flush=True)

    def flush(self) -> None:
        pass


def progress(title: str, **options: Any) -> Any:
    """A bar on stderr; if that is no terminal, a line every ten seconds from the tenth on."""
    if not sys.stderr.isatty():
        options |= {"file": _Lines(), "delay": _EVERY, "mininterval": _EVERY, "ncols": 80}
    return tqdm(desc=title, **options)
