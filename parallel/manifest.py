"""Checkpoint folders on disk: names, checksums, the commit, and folders that do not count.

A checkpoint is written into `step_N.tmp` and becomes `step_N` by one rename, once all files and
COMMIT.json have reached the disk. COMMIT.json has the size and CRC-32 of every file, for torch_dist
loads a flipped byte without complaint. Other suffixes: `.bad` failed verification, `.old` is of an
earlier run in the same folder. Nothing here communicates.
"""

import json
import os
import re
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

COMMIT = "COMMIT.json"
_STEP = re.compile(r"step_(\d{8,})")
_CHUNK = 16 << 20

Sums = dict[str, tuple[int, int]]
"""File name -> (bytes, CRC-32)."""


class Invalid(Exception):
    """A checkpoint folder is damaged; the message names the file."""


@dataclass(frozen=True)
class Commit:
    """What COMMIT.json says of a checkpoint: step, ranks that wrote it, sums of its files."""

    step: int
    world: int
    files: Sums


def probe(root: Path) -> None:
    """Create `root` if need be and write to it.

    Raises:
        OSError: that is not possible.
    """
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root) as file:
        file.write(b"probe")


def folder_of(root: Path, step: int) -> Path:
    """Folder of the checkpoint of `step`."""
    return root / f"step_{step:08d}"


def unfinished(folder: Path) -> Path:
    """Where the checkpoint `folder` is written before it is committed."""
    return folder.with_name(folder.name + ".tmp")


def committed(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every folder with a final name, newest first; not verified."""
    if not root.is_dir():
        return []
    named = ((_STEP.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir())
    return sorted(((int(m.group(1)), path) for m, path in named if m), reverse=True)


def with_suffix(root: Path, suffix: str) -> list[Path]:
    """Checkpoint folders that were renamed: `.tmp`, `.bad`, `.old`."""
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


def share(files: Sums, rank: int, world: int) -> Sums:
    """The part of `files` that `rank` verifies: about the same number of bytes on every rank."""
    by_size = sorted(files, key=lambda name: (-files[name][0], name))
    return {name: files[name] for name in by_size[rank::world]}


def verify(folder: Path, files: Sums) -> list[str]:
    """One line for each of `files` that is missing or not what was written.

    Raises:
        OSError: a file is there and cannot be read, which says nothing about the checkpoint.
    """
    problems = []
    for name, (size, crc) in files.items():
        try:
            found_size, found_crc = checksum(folder / name)
        except FileNotFoundError:
            problems.append(f"{name} is missing")
            continue
        if found_size != size:
            problems.append(f"{name} has {found_size} bytes, not {size}")
        elif found_crc != crc:
            problems.append(f"{name} has {size} bytes as it should, but its contents changed")
    return problems


def read_commit(folder: Path) -> Commit:
    """COMMIT.json of a folder.

    Raises:
        Invalid: it is missing or damaged.
    """
    try:
        record = json.loads((folder / COMMIT).read_bytes())
        seal = record.pop("seal")
        step, world, files = record["step"], record["world"], record["files"]
    except FileNotFoundError:
        raise Invalid(f"{COMMIT} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Invalid(f"{COMMIT} is not readable") from None
    if seal != _seal(record):
        raise Invalid(f"{COMMIT} was changed after it was written")
    return Commit(step, world, {name: (size, crc) for name, (size, crc) in files.items()})


def commit(folder: Path, final: Path, record: Commit) -> None:
    """Make `folder` the checkpoint `final`: COMMIT.json, disk, rename. All or nothing.

    A folder that has the name already is replaced.
    """
    data = {**asdict(record), "saved": time.strftime("%Y-%m-%d %H:%M:%S%z")}
    data["seal"] = _seal(data)
    for name in record.files:
        if not name.endswith(".distcp"):  # these were synced by the rank that wrote them
            _sync(folder / name)
    path = folder / COMMIT
    path.write_text(json.dumps(data, indent=1))
    _sync(path)
    _sync(folder)
    if final.exists():
        set_aside(final, ".old")
    os.replace(folder, final)
    _sync(final.parent)


def set_aside(folder: Path, suffix: str) -> Path:
    """Rename a folder so that it no longer counts as a checkpoint; the new path."""
    target, n = folder.with_name(folder.name + suffix), 1
    while target.exists():
        n += 1
        target = folder.with_name(f"{folder.name}{suffix}{n}")
    os.replace(folder, target)
    return target


def remove(folders: Iterable[Path]) -> None:
    """Delete folders as far as that is possible.

    What an interrupted deletion leaves has a name that no longer counts.
    """
    for folder in folders:
        try:
            if _STEP.fullmatch(folder.name):
                folder = set_aside(folder, ".tmp")
            shutil.rmtree(folder)
        except OSError:
            continue


def _seal(record: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
