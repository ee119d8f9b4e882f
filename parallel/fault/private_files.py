"""Files that only the user of the run may read: stacks have values, paths and commands in them.

Imports the standard library alone, as a guard process writes them too.
"""

import os
from pathlib import Path
from typing import IO, Any


def make_private(folder: Path) -> None:
    """Make a folder of mode 0700, if it is not there; those above it take the umask."""
    folder.mkdir(0o700, parents=True, exist_ok=True)


def open_private(path: Path, mode: str, encoding: str | None = None) -> IO[Any]:
    """Open a new file of mode 0600; one that is there is removed, as its mode would stay."""
    path.unlink(missing_ok=True)
    return open(path, mode, encoding=encoding, opener=lambda p, flags: os.open(p, flags, 0o600))
