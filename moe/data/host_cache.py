"""data.cache: folders that one process of a host builds and all of its processes read.

Holds the embedded corpus and sample indices. Invariant: a folder is complete or absent, even if a
process is killed.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


class DataError(ValueError):
    """Input that cannot be trained on; the message names the file or the override that fixes it."""


def cache_folder(cache: str) -> Path:
    """Folder of `data.cache`; empty means .cache/phalanx in the home folder."""
    try:
        return Path(cache or "~/.cache/phalanx").expanduser().absolute()
    except RuntimeError:
        raise DataError(
            "there is no home folder for the cache; set data.cache to a writable folder"
        ) from None


def built_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return the folder `target`; if absent, `build` fills a private one that is renamed to it.

    One process builds while the others wait for its lock. Without locks, or without locks across
    hosts, several may build, and the first rename wins. The next build removes leftovers of a
    killed process. Raises DataError if the cache cannot be written.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock") as locked:
            if not target.is_dir():
                _build(target, build, alone=locked)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(
            f"{target.parent} cannot be written ({reason}); set data.cache to a writable folder"
        ) from error
    return target


def _build(target: Path, build: Callable[[Path], None], alone: bool) -> None:
    stem = f".{target.name}.{socket.gethostname()}."
    if alone:  # then no process on this host is writing the existing folders
        for stale in target.parent.glob(f"{stem}*"):
            shutil.rmtree(stale, ignore_errors=True)
    private = target.parent / f"{stem}{os.getpid()}"
    private.mkdir()
    try:
        build(private)
        for path in private.iterdir():
            sync(path)
        os.rename(private, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    finally:
        shutil.rmtree(private, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file to disk before its rename, which may otherwise survive a crash without it."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Lock a file; yields False if the file system has no locks, as some Lustre and NFS mounts."""
    with path.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
            locked = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            locked = False
        yield locked


def shared_arrays(
    folder: Path, kind: str, key: dict[str, Any], build: Callable[[], Sequence[np.ndarray]]
) -> tuple[np.ndarray, ...]:
    """Arrays of `build`, stored in `folder` under a digest of `key`, memory-mapped."""

    def write(private: Path) -> None:
        for number, array in enumerate(build()):
            np.save(private / f"{number}.npy", array)
        (private / "key.json").write_text(json.dumps(key) + "\n")

    target = built_once(folder / f"{kind}-{digest(key)}", write)
    try:
        mapped = [np.load(path, mmap_mode="r") for path in sorted(target.glob("*.npy"))]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{target} is damaged ({error}); delete it") from error
    return tuple(np.asarray(array) for array in mapped)


FilePart = tuple[int, Callable[[int, int], bytes]]
"""(size of a file, function that reads (offset, bytes))."""


@contextlib.contextmanager
def opened_parts(*paths: Path) -> Iterator[list[FilePart]]:
    """Local files for `stamp`, open inside the block."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open("rb")).fileno() for path in paths]

        def part(file: int) -> FilePart:
            return os.fstat(file).st_size, lambda at, count: os.pread(file, count, at)

        yield [part(file) for file in files]


def stamp(parts: Sequence[FilePart], blocks: int = 64, block: int = 1 << 16) -> str:
    """Digest of sizes and of evenly spaced blocks of each file (of all of it below 4 MiB)."""
    total = hashlib.sha256()
    for size, read in parts:
        total.update(size.to_bytes(8, "little"))
        if size <= blocks * block:
            total.update(read(0, size))
            continue
        for i in range(blocks):
            total.update(read((size - block) * i // (blocks - 1), block))
    return total.hexdigest()[:32]


def digest(content: Any) -> str:
    """Short digest of a JSON value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
