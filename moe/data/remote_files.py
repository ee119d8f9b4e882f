"""Token files in an object store: small files are copied to data.cache, tokens are read by range.

A host copies each version of an object once, identified by address, size and mark. In Megatron-Core
only global rank 0 copies the index, a missing object is not detected, and each read fetches a block
of 256 MiB, which does not suit shuffled documents.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.configs.addresses import is_address
from phalanx.moe.data.host_cache import (
    DataError,
    built_once,
    cache_folder,
    digest,
    opened_parts,
    stamp,
)
from phalanx.parallel.object_store import CHUNK, Entry, Refused, Remote, persist

NAME = "corpus"
_CHECK_SECONDS = 30.0  # between checks that the object is unchanged
READERS = 8  # threads that read samples ahead: a request to a store takes tens of milliseconds


@dataclass(frozen=True)
class RemotePair:
    """A pair whose .bin stays in the store."""

    prefix: str  # of the local .idx, and of an empty .bin, which Megatron-Core needs
    binary: Remote
    entry: Entry  # entry of the .bin
    stamp: str

    def reader(self) -> "RemoteBinReader":
        """Reader of its tokens."""
        return RemoteBinReader(self.binary, self.entry)


class RemoteBinReader:
    """A .bin in a store, as `bin_reader` of IndexedDataset. Threads may share it."""

    def __init__(self, binary: Remote, entry: Entry) -> None:
        self._binary, self._entry, self._checked = binary, entry, time.monotonic()

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """`count` ids from `offset`; a DataError if the object is unreadable or has changed."""
        stop = offset + count * np.dtype(dtype).itemsize
        raw = _request(lambda: persist(lambda: self._binary.read(offset, stop)))
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self._checked = time.monotonic()
            same = _request(lambda: persist(self._binary.entry)) == self._entry
        else:
            same = True
        if len(raw) == stop - offset and same:
            return np.frombuffer(raw, dtype)
        raise DataError(
            f"{self._binary} was changed while this run reads it; restore or rebuild the data, and "
            "restart the run: it continues from its newest checkpoint"
        )


def remote_pair(address: str, cache: Path) -> RemotePair:
    """Copy the index of a pair to `cache`, unless it is there. Raises DataError if it cannot."""
    binary, index = Remote(f"{address}.bin"), Remote(f"{address}.idx")
    entries = []
    for path in (binary, index):
        entry = _entry(path)
        if entry is None:
            raise DataError(
                f"{path} does not exist; data.blend takes prefixes of .bin/.idx without the ending"
            )
        entries.append(entry)
    bin_entry, idx_entry = entries

    def build(folder: Path) -> None:
        _copy(index, idx_entry, folder / f"{NAME}.idx")
        (folder / f"{NAME}.bin").touch()
        with opened_parts(folder / f"{NAME}.idx") as (copied,):
            tokens = bin_entry.size, lambda at, count: _read(binary, at, count)
            (folder / "stamp").write_text(stamp([tokens, copied]))
        _unchanged(binary, bin_entry)

    key = [address, [bin_entry.size, bin_entry.mark], [idx_entry.size, idx_entry.mark]]
    folder = built_once(cache / "objects" / digest(key), build)
    mark = (folder / "stamp").read_text()
    return RemotePair(str(folder / NAME), binary, bin_entry, mark)


def beside(entry: str, cache: str) -> str:
    """Local prefix of .json and .tokenizer.json of an entry of `data.blend`, if reachable."""
    if not is_address(entry):
        return str(Path(entry).expanduser())
    try:
        return described(entry, cache_folder(cache))
    except DataError:  # an unreachable file counts as missing
        return entry


def described(address: str, cache: Path) -> str:
    """Prefix of local copies of those of .json and .tokenizer.json that a pair has."""
    paths = [Remote(f"{address}{ending}") for ending in (".json", ".tokenizer.json")]
    existing = [(path, entry) for path in paths if (entry := _entry(path, optional=True))]

    def build(folder: Path) -> None:
        for path, entry in existing:
            _copy(path, entry, folder / (NAME + path.address.removeprefix(address)))

    key = [[path.address, entry.size, entry.mark] for path, entry in existing]
    return str(built_once(cache / "objects" / digest([address, key]), build) / NAME)


def _entry(path: Remote, optional: bool = False) -> Entry | None:
    try:
        return path.entry()
    except FileNotFoundError:
        return None
    except OSError as error:
        # Without permission to list a bucket, a missing object is answered with "denied".
        if optional and isinstance(error, Refused) and error.denied:
            return None
        raise DataError(f"{error} (data.blend)") from None


def _copy(path: Remote, entry: Entry, to: Path) -> None:
    step = 8 * CHUNK
    with to.open("wb") as file:
        for start in range(0, entry.size, step):
            file.write(_read(path, start, min(step, entry.size - start)))
    _unchanged(path, entry)


def _unchanged(path: Remote, entry: Entry) -> None:
    if _entry(path) != entry:
        raise DataError(f"{path} was changed while it was read; restart (data.blend)")


def _read(path: Remote, at: int, count: int) -> bytes:
    return _request(lambda: persist(lambda: path.read(at, at + count)))


def _request[T](work: Callable[[], T]) -> T:
    """Turn an OSError of the store into a DataError, unlike one of the cache."""
    try:
        return work()
    except OSError as error:
        raise DataError(f"{error} (data.blend)") from None
