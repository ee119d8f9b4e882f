"""Room for checkpoints on the disk of a run folder, looked at before a run starts.

A checkpoint is complete before the one that it replaces is deleted, so that a run needs room for
one more than it keeps. Quotas that the file system does not count as free space are not seen.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

from phalanx.parallel.checkpoint import commit


class Room(NamedTuple):
    """Bytes for the checkpoints of a run."""

    free: int  # free now, or as soon as the first save begins
    held: int  # taken by checkpoints that saves of the run will delete


def free_bytes(folder: Path) -> int | None:
    """Bytes that this user can write to the disk of a folder, which need not exist.

    None: the file system does not tell, as some of object stores. Raises OSError.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    disk = shutil.disk_usage(existing)
    return disk.free if disk.total else None


def room(root: Path, keep_every: int) -> Room | None:
    """Room in the folder of a run's checkpoints; None if the file system does not tell it."""
    if (free := free_bytes(root)) is None:
        return None
    unfinished = commit.with_suffix(root, ".tmp")
    kept = commit.committed(root)
    replaced = [path for step, path in kept if not keep_every or step % keep_every]
    replaced += commit.with_suffix(root, ".old")
    return Room(free + _bytes(unfinished), _bytes(replaced))


def saves(first: int, last: int, interval: int) -> int:
    """Number of checkpoints that a run saves from step `first` to step `last`."""
    if first >= last or interval < 0:
        return 0
    if not interval:
        return 1
    return last // interval - first // interval + bool(last % interval)


def _bytes(folders: list[Path]) -> int:
    return sum(commit.total_bytes(folder)[0] for folder in folders)
