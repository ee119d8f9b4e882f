"""Uploads the shards of a rank: in this process, or for a forked writer in a fresh one.

The store's library works with threads, which a fork of a process with threads must not start. The
fresh process writes why it failed to standard output, and ends with its parent.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import phalanx
from phalanx.parallel.checkpoint import remote
from phalanx.parallel.fault.guard import SIGNALS
from phalanx.parallel.fault.signals import end_with_parent
from phalanx.parallel.object_store import Remote


def upload(files: Sequence[Path], folder: Remote, *, apart: bool) -> None:
    """Make objects below a prefix of files; `apart` in a fresh process. Raises OSError."""
    if apart:
        _in_fresh_process(files, folder)
    else:
        for file in files:
            remote.upload(file, folder)


def _in_fresh_process(files: Sequence[Path], folder: Remote) -> None:
    root = str(Path(phalanx.__path__[0]).parent)
    command = [sys.executable, "-P", "-c", _BEGIN, root, str(os.getpid()), folder.address]
    # What asks the run to end does not end this: the upload is part of the save before the end.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        done = subprocess.run(
            [*command, *map(str, files)],
            env={k: v for k, v in os.environ.items() if k != "RANK"},  # it is no rank
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if done.returncode:
        text = done.stdout.decode(errors="replace").strip()
        raise OSError(text or f"the upload to {folder} ended with {done.returncode}")


_BEGIN = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from phalanx.parallel.checkpoint.upload import main; sys.exit(main(sys.argv[2:]))"
)


def main(argv: Sequence[str]) -> int:
    """Parent, address, files. Returns the exit code."""
    parent, address, *files = argv
    end_with_parent(signal.SIGKILL)
    if os.getppid() != int(parent):
        return 1
    try:
        upload([Path(file) for file in files], Remote(address), apart=False)
    except OSError as error:
        print(error)
        return 1
    return 0
