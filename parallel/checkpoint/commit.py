"""Checkpoint folders on disk: names, checksums, the commit, and folders that do not count.

A checkpoint is written into `step_N.tmp` and becomes `step_N` by one rename, once all files and
COMMIT.json have reached the disk. COMMIT.json has the size and CRC-32 of every file, for torch_dist
loads a flipped byte without complaint. Other suffixes: `.new` is complete and takes the place of
the folder without it, which `recover` ends after a crash; `.bad` failed verification, `.old` is of
an earlier run in the same folder. COMMIT.json may come from elsewhere: it can name no file outside
of its folder.

What is dispatched on its first argument is here for folders, and for prefixes of an object store in
parallel.checkpoint.remote.
"""

import errno
import json
import os
import re
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.object_store import Place, by_place

COMMIT = "COMMIT.json"
FORMAT = (1, 0)
"""Version of a checkpoint's files, in COMMIT.json; those without are 1.0. A reader takes any minor
version of its own major version or an older one."""
METADATA = ".metadata"
_REQUIRED = (METADATA, "metadata.json")
_SHARD = re.compile(r"__\d+_\d+\.distcp", re.ASCII)
_VERSION = re.compile(r"[0-9]{1,6}\.[0-9]{1,6}", re.ASCII)
_STEP = re.compile(r"step_(\d{8,})", re.ASCII)
_NEW = ".new"
_CHUNK = 16 << 20
_PROBE = 64 << 10
LARGEST = 64 << 20  # bytes of a COMMIT.json (a million files), and of plain objects
_LARGEST_OF = {METADATA: 1 << 30, "metadata.json": LARGEST}  # these are read as a whole

Sums = dict[str, tuple[int, int]]  # file name -> (bytes, CRC-32)


class Invalid(Exception):
    """A checkpoint folder is damaged; the message names the file."""


class NewerFormat(CheckpointMismatch):
    """A checkpoint of a format that this version cannot read, sound as far as can be told.

    It is left as it is: neither set aside nor passed over for an older one.
    """


@dataclass(frozen=True)
class Commit:
    """Content of COMMIT.json: step, number of ranks that wrote the files, their checksums."""

    step: int
    world: int
    files: Sums


def probe(root: Path) -> None:
    """Create `root` if need be and write to it, or raise OSError."""
    root.mkdir(parents=True, exist_ok=True)
    try_to_write(root)


def try_to_write(folder: Path) -> None:
    """Write to a folder's disk, where nothing is left of it. Raises OSError.

    A full disk may have room for a name, and for what has not reached it yet.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        if file.write(bytes(_PROBE)) < _PROBE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file.fileno())


@by_place
def folder_of(root: Path, step: int) -> Any:
    """Return the folder of the checkpoint of `step`."""
    return root / f"step_{step:08d}"


def unfinished(folder: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is committed as `folder`."""
    return folder.with_name(folder.name + ".tmp")


@by_place
def committed(root: Path) -> list[tuple[int, Any]]:
    """(step, folder) of every folder with a final name, newest first; not verified."""
    if not root.is_dir():
        return []
    named = ((_STEP.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted(((int(m.group(1)), path) for m, path in named if m), reverse=True)


@by_place
def with_suffix(root: Path, suffix: str) -> list[Any]:
    """Checkpoint folders that were renamed: `.tmp`, `.new`, `.bad`, `.old`."""
    if not root.is_dir():
        return []
    pattern = re.compile(rf"{_STEP.pattern}{re.escape(suffix)}\d*")
    return sorted(path for path in root.iterdir() if pattern.fullmatch(path.name))


def checksum(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    size = crc = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return size, crc


crc32 = zlib.crc32


@by_place
def contents(path: Path, start: int = 0, length: int | None = None) -> bytes:
    """Bytes of a file from `start` on, `length` of them or all."""
    with path.open("rb") as file:
        file.seek(start)
        return file.read(-1 if length is None else length)


@by_place
def open_checked(path: Path, size: int) -> BinaryIO:
    """A file of `size` bytes, to read from any place in it."""
    return path.open("rb")


@by_place
def total_bytes(folder: Path) -> tuple[int, float]:
    """Bytes of all files, and seconds since the epoch at which the newest was written."""
    files = [path.stat() for path in folder.iterdir() if path.is_file()]
    newest = max((file.st_mtime for file in files), default=folder.stat().st_mtime)
    return sum(file.st_size for file in files), newest


@by_place
def sizes_differ(folder: Path, files: Sums) -> str:
    """Return the first difference of names and sizes of files from COMMIT.json; empty if none.

    Raises FileNotFoundError for a missing file.
    """
    for name, (size, _) in files.items():
        if (found := (folder / name).stat().st_size) != size:
            return f"{name} has {found} bytes, not {size}"
    return ""


def share(files: Sums, rank: int, world: int) -> Sums:
    """The part of `files` that `rank` verifies: about the same number of bytes on every rank."""
    by_size = sorted(files, key=lambda name: (-files[name][0], name))
    return {name: files[name] for name in by_size[rank::world]}


@by_place
def verify(folder: Path, files: Sums, read: Callable[[int], object] | None = None) -> list[str]:
    """One line for each of `files` that is missing or not what was written.

    `read` is told the bytes of each file once it has been read. An OSError of a file that is there
    and cannot be read says nothing about the checkpoint.
    """
    problems = []
    for name, (size, crc) in files.items():
        try:
            if not _is_file(folder / name):
                problems.append(f"{name} is a link or no file")
                continue
            found_size, found_crc = checksum(folder / name)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if found_size != size:
            problems.append(f"{name} has {found_size} bytes, not {size}")
        elif found_crc != crc:
            problems.append(f"{name} has {size} bytes as it should, but its contents changed")
        if read is not None:
            read(found_size)
    return problems


@by_place
def read_commit(folder: Path) -> Commit:
    """COMMIT.json of a folder.

    Raises:
        Invalid: it is missing or damaged, or Megatron-Core would read a file of the folder that no
            checkpoint of ours has.
        NewerFormat: only a newer version can read it.
        OSError: it cannot be read, which says nothing about the checkpoint.
    """
    path = folder / COMMIT
    try:
        if not _is_file(path) or path.stat().st_size > LARGEST:
            raise Invalid(f"{COMMIT} is not readable")
        commit = parse(path.read_bytes(), folder)
    except FileNotFoundError:
        raise Invalid(f"{COMMIT} is missing") from None
    if os.path.lexists(folder / "common.pt"):
        raise Invalid("common.pt is no file of a checkpoint")
    return commit


def parse(data: bytes, folder: Place | None = None) -> Commit:
    """The contents of a COMMIT.json.

    Raises:
        Invalid: it is damaged, or names a file that is none of a checkpoint.
        NewerFormat: only a newer version can read it.
    """
    try:
        record = json.loads(data)
        version = record.get("format", _show_format(FORMAT))
    except (ValueError, AttributeError, RecursionError):
        raise Invalid(f"{COMMIT} is not readable") from None
    _check_format(version, folder)
    try:
        seal = record.pop("seal")
        step, world, files = record["step"], record["world"], record["files"]
        expected = _seal(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Invalid(f"{COMMIT} is not readable") from None
    if seal != expected:
        raise Invalid(f"{COMMIT} was changed after it was written")
    if not (_is_count(step) and _is_count(world) and world and isinstance(files, dict)):
        raise Invalid(f"{COMMIT} is not readable")
    for name, sums in files.items():
        if name not in _REQUIRED and not _SHARD.fullmatch(name):
            raise Invalid(f"{COMMIT} names {name[:80]!r}, which is no file of a checkpoint")
        if not (isinstance(sums, list) and len(sums) == 2 and all(map(_is_count, sums))):
            raise Invalid(f"{COMMIT} has no size and checksum of {name}")
        if sums[0] > _LARGEST_OF.get(name, sums[0]):
            raise Invalid(f"{name} is larger than any description of a checkpoint")
    if lost := [name for name in _REQUIRED if name not in files]:
        raise Invalid(f"{COMMIT} does not name {lost[0]}")
    return Commit(step, world, {name: (size, crc) for name, (size, crc) in files.items()})


def commit(folder: Path, final: Path, record: Commit) -> None:
    """Make `folder` the checkpoint `final`: COMMIT.json, disk, rename. All or nothing.

    A folder that has the name already is replaced, and set aside as `.old`: two renames, which
    `recover` ends after a crash in between.
    """
    for name in record.files:
        if not name.endswith(".distcp"):  # these were synced by the rank that wrote them
            sync(folder / name)
    path = folder / COMMIT
    path.write_bytes(with_checksum(record))
    sync(path)
    sync(folder)
    if final.exists():
        complete = final.with_name(final.name + _NEW)
        os.replace(folder, complete)
        sync(final.parent)  # the old one must not lose its name before the new one has this
        _take_place(complete, final)
    else:
        os.replace(folder, final)
    sync(final.parent)


def with_checksum(record: Commit, **more: Any) -> bytes:
    """Return the text of COMMIT.json: the record, `more`, its time, and a checksum of all that."""
    data: dict[str, Any] = {"format": _show_format(FORMAT), **asdict(record), **more}
    data["saved"] = time.strftime("%Y-%m-%d %H:%M:%S%z")
    data["seal"] = _seal(data)
    return json.dumps(data, indent=1).encode()


@by_place
def recover(root: Path) -> None:
    """End the replacements of checkpoints that a crash interrupted. Raises OSError."""
    for complete in with_suffix(root, _NEW):
        _take_place(complete, complete.with_name(complete.stem))
        sync(root)


def _take_place(complete: Path, final: Path) -> None:
    if final.exists():
        set_aside(final, ".old")
    os.replace(complete, final)


def superseded[P: Place](
    checkpoints: Iterable[tuple[int, P]],
    keep_last: int,
    keep_every: int,
    keep_steps: Iterable[int] = (),
) -> list[P]:
    """Checkpoints to delete: neither among the newest `keep_last` nor of a step kept for good."""
    older, kept = sorted(checkpoints, reverse=True)[keep_last:], set(keep_steps)
    return [
        path for step, path in older if step not in kept and (not keep_every or step % keep_every)
    ]


@by_place
def set_aside(folder: Path, suffix: str) -> Any:
    """Rename a folder, also again, so that it no longer counts as a checkpoint; the new path."""
    name, n = folder.name.partition(".")[0], 1
    target = folder.with_name(name + suffix)
    while target.exists():
        n += 1
        target = folder.with_name(f"{name}{suffix}{n}")
    os.replace(folder, target)
    return target


def remove(folders: Iterable[Place]) -> None:
    """Delete folders as far as that is possible."""
    for folder in folders:
        with suppress(OSError):
            delete(folder)


@by_place
def delete(folder: Path) -> None:
    """Delete a folder. What an interrupted deletion leaves no longer counts as a checkpoint."""
    if _STEP.fullmatch(folder.name):
        folder = set_aside(folder, ".tmp")
    shutil.rmtree(folder)


def _check_format(text: Any, folder: Place | None) -> None:
    """Refuse a newer major version, before anything is read that it may have changed."""
    if not (isinstance(text, str) and _VERSION.fullmatch(text)):
        raise Invalid(f"{COMMIT} is not readable")
    if int(text.partition(".")[0]) > FORMAT[0]:
        where, own = folder / COMMIT if folder else COMMIT, _show_format(FORMAT)
        raise NewerFormat(
            f"{where} has format {text}, and this version reads formats up to {own}: "
            "use the version that wrote it, or a newer one"
        )


def _show_format(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _seal(record: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
