"""Objects of a store (S3 and all else that fsspec knows) by their addresses.

A store has no folders and no rename: one PUT of one object is whole or absent, and all that is
built here rests on that alone. Nothing that a store lists is cached. Whatever goes wrong is an
OSError of one line, without secrets. Credentials are those that the store's own library finds.
Imports neither torch nor, before an address is used, fsspec.
"""

import errno
import re
import time
from argparse import ArgumentTypeError
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import singledispatch
from pathlib import Path
from typing import Any, Protocol, cast

from phalanx.configs.addresses import flaw, is_address
from phalanx.configs.redact import redacted

CHUNK = 16 << 20  # bytes of one request of a longer read
TOGETHER = 8  # requests of a longer read that are on their way at once
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds between attempts at what a run depends on, besides those of the library."""

_FINAL = (FileNotFoundError, FileExistsError, PermissionError, ImportError, ValueError)
_SAME_VERSION = ("s3fs", "gcsfs")
"""Packages that need the version of fsspec that they are released with."""


@dataclass(frozen=True)
class Entry:
    """An object as its store lists it."""

    size: int
    mark: str  # changes with the contents: the ETag, or the time of the last change
    changed: float  # seconds since the epoch; 0 where the store does not tell


@dataclass(frozen=True, order=True)
class Remote:
    """An object, or the objects below a prefix. As of a Path, `/` goes below, `parent` above.

    All methods raise OSError; FileNotFoundError where there is no such object.
    """

    address: str

    def __str__(self) -> str:
        return redacted(self.address)

    def __truediv__(self, name: str) -> "Remote":
        return Remote(f"{self.address.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def parent(self) -> "Remote":
        return Remote(self.address.rpartition("/")[0])

    def resolve(self) -> "Remote":
        return self

    def objects(self) -> dict[str, Entry]:
        """All objects below, by the rest of their names."""
        with self._asked("list") as (fs, path):
            try:
                found = fs.find(path, detail=True)
            except FileNotFoundError:
                found = {}
        if not found:
            self._look_for_bucket()
        top = path.rstrip("/") + "/"
        return {k.removeprefix(top): _entry(v) for k, v in found.items() if k.startswith(top)}

    def entry(self) -> Entry:
        with self._asked("read") as (fs, path):
            info = fs.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(path)
            return _entry(info)

    def is_file(self) -> bool:
        try:
            self.entry()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        with self._asked("list") as (fs, path), suppress(FileNotFoundError):
            if any(fs.ls(path, detail=False)):
                return not fs.isfile(path)
        self._look_for_bucket()
        return False

    def _look_for_bucket(self) -> None:
        """Raise OSError if it is a bucket that does not exist in which there is nothing.

        Stores list such a one as empty, and only tell when an object is asked for.
        """
        with suppress(FileNotFoundError), self._asked("list") as (fs, path):
            fs.info(f"{path.rstrip('/')}/none")

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def read(self, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop), all of which the object has; without `stop` all of it."""
        if stop is None or stop - start <= CHUNK:
            with self._asked("read") as (fs, path):
                return bytes(fs.cat_file(path, start=start, end=stop)) if stop != start else b""
        starts = list(range(start, stop, CHUNK))
        stops = [*starts[1:], stop]
        with self._asked("read") as (fs, path):
            parts = fs.cat_ranges(
                [path] * len(starts), starts, stops, batch_size=TOGETHER, on_error="raise"
            )
        return b"".join(parts)

    def write(self, data: bytes) -> None:
        with self._asked("write") as (fs, path):
            fs.pipe_file(path, data)

    def upload(self, file: Path) -> None:
        with self._asked("write") as (fs, path):
            fs.put_file(str(file), path)

    def delete(self, names: Sequence[str] = ()) -> None:
        """Delete the object, or some below, by name; what is gone already is no error."""
        with self._asked("delete") as (fs, path):
            paths = [f"{path}/{name}" for name in names] or [path]
            try:
                fs.rm(paths) if names else fs.rm_file(path)
            except FileNotFoundError:  # which may have left the others
                for one in paths:
                    with suppress(FileNotFoundError):
                        fs.rm_file(one)

    @contextmanager
    def _asked(self, doing: str) -> "Iterator[tuple[Any, str]]":
        """(file system, name in it); what goes wrong inside is told in the way of this class."""
        try:
            from fsspec.core import url_to_fs

            yield url_to_fs(self.address, use_listings_cache=False)
        except FileNotFoundError as error:
            if bucket := re.search(r"bucket does not exist", str(error), re.I):
                raise OSError(f"cannot {doing} {self}: the {bucket[0]}") from None
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self)) from None
        except Exception as error:
            raise Refused(f"cannot {doing} {self}: {_reason(error, self.address)}", error) from None


class Refused(OSError):
    """Told to the user. `again`: another attempt could succeed; `denied`: access is not allowed."""

    def __init__(self, text: str, cause: Exception) -> None:
        super().__init__(text)
        self.denied = isinstance(cause, PermissionError)
        self.again = not isinstance(cause, _FINAL) and "Credentials" not in type(cause).__name__


type Place = Path | Remote  # a folder of a file system, or a prefix of an object store


def place(text: str) -> Place:
    """Return the folder that a user names: an address, or a path."""
    return Remote(text.strip().rstrip("/")) if is_address(text) else Path(text)


class ByPlace[T](Protocol):
    """A function that is another one for a `Remote`."""

    def __call__(self, place: Any, *args: Any, **kw: Any) -> T: ...

    def register(self, of_remote: Callable[..., T]) -> Callable[..., T]:
        """Take `of_remote`, whose first argument is annotated so."""
        ...


def by_place[T](of_folder: Callable[..., T]) -> ByPlace[T]:
    """`functools.singledispatch`, with types."""
    return cast(ByPlace[T], singledispatch(of_folder))


def argument(text: str) -> Place:
    """`place`, as the type of an argument of a command."""
    if is_address(text) and (found := flaw(text)):
        raise ArgumentTypeError(f"{redacted(text)} {found[0]}: give {redacted(found[1])}")
    return place(text)


def folder_argument(text: str) -> Path:
    """A path, as the type of an argument that takes no address."""
    if is_address(text):
        raise ArgumentTypeError(f"{redacted(text)} is an address: give a folder or file here")
    return Path(text)


def persist[T](work: Callable[[], T]) -> T:
    """`work()`, tried again for half a minute while the store does not answer as it should.

    Raises OSError of the last attempt, or of one that no other could mend.
    """
    for wait in WAITS:
        try:
            return work()
        except Refused as error:
            if not error.again:
                raise
        time.sleep(wait)
    return work()


@contextmanager
def in_order[A, T](
    work: Callable[[A], T], items: Sequence[A], size: Callable[[A], int]
) -> Iterator[Iterator[T]]:
    """`work` of each item in their order, some ahead of the one that is asked for.

    A context, whose end waits for its threads: the garbage collector would do it within whatever
    thread it runs in, and hang where that one is being started. `work` runs in several threads; of
    results, `size` bytes each, at most `TOGETHER` chunks, or one item, are held.
    """

    def results() -> Iterator[T]:
        waiting: deque[tuple[int, Future[T]]] = deque()
        held, left = 0, deque(items)
        while waiting or left:
            while left and (not waiting or held + size(left[0]) <= TOGETHER * CHUNK):
                item = left.popleft()
                held += size(item)
                waiting.append((size(item), threads.submit(work, item)))
            count, future = waiting.popleft()
            yield future.result()
            held -= count

    with ThreadPoolExecutor(TOGETHER, "object-store") as threads:
        yield results()


def _entry(info: dict[str, Any]) -> Entry:
    times = (info.get(key) for key in ("LastModified", "mtime", "updated", "created"))
    changed = next((when for when in times if when), 0.0)
    if isinstance(changed, datetime):
        changed = changed.timestamp()
    mark = info.get("ETag") or info.get("etag") or info.get("md5Hash") or changed or ""
    seconds = changed if isinstance(changed, float) else 0.0
    return Entry(int(info.get("size") or 0), str(mark).strip('"'), seconds)


def _reason(error: Exception, address: str) -> str:
    if isinstance(error, ImportError):
        return _missing(address.partition("://")[0])
    if isinstance(error, ValueError) and "Protocol not known" in str(error):
        return f"fsspec knows no {address.partition('://')[0]}://"
    text = " ".join(str(error).split()) or type(error).__name__
    if "Credentials" in type(error).__name__:
        text += " (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the files of the AWS CLI)"
    who = address.partition("://")[2].rpartition("@")[0]
    return redacted(text.replace(who, "***") if who else text)


def _missing(scheme: str) -> str:
    import fsspec
    from fsspec.registry import known_implementations

    package = str(known_implementations.get(scheme, {}).get("class", scheme)).partition(".")[0]
    version = f"=={fsspec.__version__}" if package in _SAME_VERSION else ""
    return f"{scheme}:// needs {package}, which is not installed: pip install {package}{version}"
