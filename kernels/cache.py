"""Compiled kernels on disk: an entry is a file of bytes under a name that identifies its content.

The name (`name_of`) decides when a kernel is recompiled; this module knows nothing about compilers
or GPUs. Entries are written to a temporary file and renamed, and carry a checksum; a damaged one is
rebuilt. Of several processes that miss an entry one builds it, the others wait. A folder that
cannot be written costs compilations, never a run.
"""

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER_VARIABLE = "PHALANX_KERNEL_CACHE"
_MARK = b"phalanx1"
_TAIL_BYTES = len(_MARK) + hashlib.sha256().digest_size
_POLL_SECONDS = 0.05
_DIGITS = 32  # of the hash in a name

_log = logging.getLogger(__name__)


@dataclass
class Statistics:
    """Counters of this process."""

    loaded: int = 0  # found on disk, also if another process built it meanwhile
    compiled: int = 0
    seconds: float = 0.0  # time spent compiling, or waiting for another process to compile


_STATISTICS = Statistics()
_COUNTING = threading.Lock()
_WATCHING: list[Callable[[str], None]] = []


def statistics() -> Statistics:
    """A copy of this process's counters."""
    with _COUNTING:
        return Statistics(**vars(_STATISTICS))


@contextlib.contextmanager
def watched(on_lookup: Callable[[str], None]) -> Iterator[None]:
    """Inside, call `on_lookup` with an entry's label before its lookup, which may compile."""
    _WATCHING.append(on_lookup)
    try:
        yield
    finally:
        _WATCHING.remove(on_lookup)


def folder() -> Path:
    """Folder of the entries: $PHALANX_KERNEL_CACHE, or ~/.cache/phalanx/kernels."""
    path = os.environ.get(FOLDER_VARIABLE)
    return Path(path) if path else Path("~/.cache/phalanx/kernels").expanduser()


@contextlib.contextmanager
def use_folder(path: Path) -> Iterator[None]:
    """Inside, `folder` is `path`."""
    before = os.environ.get(FOLDER_VARIABLE)
    os.environ[FOLDER_VARIABLE] = str(path)
    try:
        yield
    finally:
        if before is None:
            del os.environ[FOLDER_VARIABLE]
        else:
            os.environ[FOLDER_VARIABLE] = before


def digest_of(files: Iterable[Path]) -> str:
    """Hash of the names and contents of files, independent of their order."""
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def name_of(label: str, *facts: str) -> str:
    """An entry's file name: a readable label and a hash of the facts its bytes depend on."""
    digest = hashlib.sha256("\0".join(facts).encode()).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', label)}-{digest[:_DIGITS]}.o"


class Cache:
    """The entries of a folder, which need not exist yet."""

    def __init__(self, folder: Path, patience: float = 300.0) -> None:
        """`patience`: seconds to wait for another process that builds an entry."""
        self.folder, self.patience = folder, patience

    def fetch(self, name: str, make: Callable[[], bytes]) -> bytes:
        """The entry `name`, or the result of `make`, which is then stored."""
        with self.claimed(name) as data:
            if data is None:
                data = make()
                self.write(name, data)
            return data

    @contextlib.contextmanager
    def claimed(self, name: str) -> Iterator[bytes | None]:
        """The entry `name`, or None: then the block builds it and calls `write`; others wait."""
        for on_lookup in _WATCHING:
            on_lookup(name[: -len("-.o") - _DIGITS])
        data = self.read(name)
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            if data is None:
                stack.enter_context(self._locked(name))
                data = self.read(name)
            yield data
            missed = int(data is None)
            _count(compiled=missed, loaded=1 - missed, seconds=time.monotonic() - start)

    def has(self, name: str) -> bool:
        return self.read(name) is not None

    def read(self, name: str) -> bytes | None:
        """The entry, or None if it does not exist or is not intact, which is logged."""
        path = self.folder / name
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            _warn(f"kernel {path} cannot be read ({error.strerror}) and is recompiled")
            return None
        data, tail = content[:-_TAIL_BYTES], content[-_TAIL_BYTES:]
        if tail != _MARK + hashlib.sha256(data).digest():
            _warn(f"kernel {path} is damaged and is recompiled")
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return data

    def write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        temporary = path.with_name(f".{name}.{secrets.token_hex(8)}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data + _MARK + hashlib.sha256(data).digest())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            _warn(
                f"compiled kernels cannot be stored in {self.folder} ({error.strerror}) and will "
                f"be recompiled by each process; {FOLDER_VARIABLE}=<folder> names another folder"
            )

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the entry's lock file, unless others hold it too long or it cannot be created."""
        path = self.folder / f".{name}.lock"
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(path.open("ab"))
                if not self._wait(name, lock.fileno()):
                    _warn(f"waited {self.patience:g} s for {path}: compiling without it")
            except OSError:  # `write` reports what is wrong with the folder
                lock = None
            yield
            # Whoever waits on the removed file, or opens a new one, looks for the entry first.
            if lock is not None and (self.folder / name).exists():
                with contextlib.suppress(OSError):
                    path.unlink()

    def _wait(self, name: str, lock: int) -> bool:
        """True if the lock was acquired, or the entry appeared, in time."""
        until = time.monotonic() + self.patience
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            if (self.folder / name).exists():
                return True
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)


def _count(**amounts: float) -> None:
    with _COUNTING:
        for field, amount in amounts.items():
            setattr(_STATISTICS, field, getattr(_STATISTICS, field) + amount)


@functools.cache
def _warn(message: str) -> None:
    _log.warning(message)
