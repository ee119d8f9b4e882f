"""Checkpoints in an object store: what parallel.checkpoint.commit does, without any rename.

A save gets a prefix of its own below that of the run, `step_<n>.<when and who>`, which no other
save writes to. COMMIT.json is put there last, once the store lists every other object with its
size; where it is not, there is no checkpoint. It also has the store's marks (ETags) of the objects,
by which a changed one is known from a listing; a copy at another address may have others. A
checkpoint that no longer counts gets an object more, BAD or OLD; one that goes loses COMMIT.json
first. Savers share OWNER.json alone: the launch that wrote it last has the prefix, and an earlier
one ends when it sees that. Importing this module makes the functions of `commit` take a `Remote`.
"""

import io
import json
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.parallel import object_store
from phalanx.parallel.checkpoint import commit
from phalanx.parallel.checkpoint.commit import COMMIT, Commit, Invalid, Sums
from phalanx.parallel.folder_lock import Owner, Taken, here
from phalanx.parallel.object_store import CHUNK, Entry, Remote, persist

OWNER = "OWNER.json"
_FOLDER = re.compile(r"step_(\d{8,})\.[0-9a-f]{16}", re.ASCII)
_LONG = 1 << 30
_AROUND = 64 << 10  # bytes of one request for a shorter read of a file that is not read as a whole
_NOTES = {".bad": "BAD", ".old": "OLD"}
"""Objects for the suffixes of local folders that no longer count."""


def probe(root: Remote) -> None:
    """Write, read and delete an object below `root`, or raise OSError."""
    path, data = root / f"probe.{secrets.token_hex(8)}", b"probe"
    path.write(data)
    same = path.read() == data
    path.delete()
    if not same:
        raise OSError(f"{path} is not what was written to it a moment ago")


class Claim:
    """The right of this launch to write below the prefix of a run, taken from any other launch."""

    def __init__(self, root: Remote) -> None:
        self._root, self._me = root, here()
        (root / OWNER).write(json.dumps(asdict(self._me), indent=1).encode())

    def check(self) -> None:
        """Raise Taken if a later launch has taken it, or OSError if that cannot be known."""
        try:
            owner = Owner(**json.loads(persist((self._root / OWNER).read)))
        except FileNotFoundError:
            raise Taken(f"this run has lost {self._root}: {OWNER} is gone") from None
        except (ValueError, TypeError):
            owner = None
        if owner is None or owner.token != self._me.token:
            raise Taken(
                f"this run has lost {self._root}, where it writes nothing more: the run on "
                f"{owner or '(unreadable)'} has taken it over"
            )


@commit.folder_of.register
def _(root: Remote, step: int) -> Remote:
    """A new one; names of the same step are in the order of time."""
    return root / f"step_{step:08d}.{int(time.time()):08x}{secrets.token_hex(4)}"


@commit.recover.register
def _(root: Remote) -> None:
    """Nothing is ever replaced."""


@commit.committed.register
def _(root: Remote) -> list[tuple[int, Remote]]:
    return sorted(
        ((step, root / name) for name, step, held in _folders(root) if _counts(held)), reverse=True
    )


@commit.with_suffix.register
def _(root: Remote, suffix: str) -> list[Remote]:
    def has(held: dict[str, Entry]) -> bool:
        if suffix == ".tmp":
            return COMMIT not in held
        return COMMIT in held and _NOTES.get(suffix) in held

    return sorted(root / name for name, _, held in _folders(root) if has(held))


@commit.read_commit.register
def _(folder: Remote) -> Commit:
    return _record(folder)[0]


@commit.sizes_differ.register
def _(folder: Remote, files: Sums) -> str:
    """Check by one listing, which compares the entity tags of the store as well."""
    marks, found = _record(folder)[1], folder.objects()
    for name, (size, _) in files.items():
        entry = found.get(name)
        if entry is None:
            return f"{name} is missing"
        if entry.size != size:
            return f"{name} has {entry.size} bytes, not {size}"
        if entry.mark != marks.get(name, entry.mark):
            return f"{name} is another object than the one that was committed"
    return ""


@commit.contents.register
def _(path: Remote, start: int = 0, length: int | None = None) -> bytes:
    if length is not None and length > _LONG:  # which a manifest may say of a short object
        length = max(0, min(length, path.entry().size - start))
    return persist(lambda: path.read(start, None if length is None else start + length))


@commit.open_checked.register
def _(path: Remote, size: int) -> BinaryIO:
    return io.BufferedReader(_Ranges(path, size), _AROUND)


class _Ranges(io.RawIOBase):
    """An object as a file that is not there: of what is read, the range is asked for."""

    def __init__(self, path: Remote, size: int) -> None:
        self._path, self._size, self._at = path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        data = commit.contents(self._path, self._at, count)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


@commit.verify.register
def _(folder: Remote, files: Sums, read: Callable[[int], object] | None = None) -> list[str]:
    problems, found = [], persist(folder.objects)
    for name, (size, crc) in files.items():
        entry = found.get(name)
        if entry is None:
            problems.append(f"{name} is missing")
        elif entry.size != size:
            problems.append(f"{name} has {entry.size} bytes, not {size}")
        elif _crc(folder / name, size, read) != crc:
            problems.append(f"{name} has {size} bytes as it should, but its contents changed")
    return problems


@commit.set_aside.register
def _(folder: Remote, suffix: str) -> Remote:
    """It keeps its name; run.resume=<address> still starts from one that is whole."""
    note = _NOTES[suffix]
    persist(lambda: (folder / note).write(time.strftime("%Y-%m-%d %H:%M:%S%z\n").encode()))
    persist(lambda: folder.delete([other for other in _NOTES.values() if other != note]))
    return folder


@commit.delete.register
def _(folder: Remote) -> None:
    (folder / COMMIT).delete()
    if names := list(folder.objects()):
        folder.delete(names)


@commit.total_bytes.register
def _(folder: Remote) -> tuple[int, float]:
    found = folder.objects().values()
    return sum(entry.size for entry in found), max((entry.changed for entry in found), default=0.0)


def complete(written: Path, final: Remote, record: Commit) -> None:
    """Put what only this rank has, look at all that is there, then COMMIT.json. All or nothing.

    Args:
        written: folder of this rank, with the files that are no shards.
        final: prefix of the checkpoint, to which all ranks have uploaded their shards.
    """
    for name in record.files:
        if not name.endswith(".distcp"):
            upload(written / name, final)
    found = persist(final.objects)
    for name, (size, _) in record.files.items():
        if name not in found:
            raise OSError(f"{final / name} is not there after its upload")
        if found[name].size != size:
            raise OSError(f"{final / name} has {found[name].size} bytes, not {size}")
    marks = {name: found[name].mark for name in record.files}
    data = commit.with_checksum(record, at=final.address, marks=marks)
    persist(lambda: (final / COMMIT).write(data))


def upload(file: Path, folder: Remote) -> None:
    """Upload a file to an object of its name."""
    persist(lambda: (folder / file.name).upload(file))


@contextmanager
def metadata_of(folder: Remote, files: Sums) -> Iterator[Path]:
    """A local folder with those of a checkpoint's files that are no shards, checked."""
    with tempfile.TemporaryDirectory(prefix="phalanx-checkpoint-") as name:
        for file, (size, crc) in files.items():
            if not file.endswith(".distcp"):
                data = commit.contents(folder / file)
                if (len(data), commit.crc32(data)) != (size, crc):
                    raise Invalid(f"{file} was changed")
                (Path(name) / file).write_bytes(data)
        yield Path(name)


def _folders(root: Remote) -> Iterator[tuple[str, int, dict[str, Entry]]]:
    held: dict[str, dict[str, Entry]] = {}
    for path, entry in root.objects().items():
        folder, _, name = path.partition("/")
        held.setdefault(folder, {})[name] = entry
    for folder, objects in held.items():
        if named := _FOLDER.fullmatch(folder):
            yield folder, int(named[1]), objects


def _counts(held: dict[str, Entry]) -> bool:
    return COMMIT in held and not any(note in held for note in _NOTES.values())


def _record(folder: Remote) -> tuple[Commit, dict[str, str]]:
    """COMMIT.json, and the marks in it, of a checkpoint that was not copied here."""
    try:
        entry = (folder / COMMIT).entry()
        if entry.size > commit.LARGEST:
            raise Invalid(f"{COMMIT} is not readable")
        data = commit.contents(folder / COMMIT)
    except FileNotFoundError:
        raise Invalid(f"{COMMIT} is missing") from None
    record, content = commit.parse(data, folder), json.loads(data)
    marks = content.get("marks", {})
    if not (isinstance(marks, dict) and all(isinstance(mark, str) for mark in marks.values())):
        raise Invalid(f"{COMMIT} is not readable")
    return record, marks if content.get("at") == folder.address else {}


def _crc(path: Remote, size: int, read: Callable[[int], object] | None) -> int:
    starts = range(0, size, CHUNK)

    def part(start: int) -> bytes:
        return commit.contents(path, start, min(CHUNK, size - start))

    crc = 0
    with object_store.in_order(part, starts, lambda _: CHUNK) as parts:
        for data in parts:
            crc = commit.crc32(data, crc)
            if read is not None:
                read(len(data))
    return crc
