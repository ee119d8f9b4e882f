"""Token files in an object store: what is small is copied to data.cache, tokens are read by range.

Between `moe.data.token_files`, which checks a pair, and the store. A copy is made once on a host
for each version of an object, by its address, size and mark. Megatron-Core has a path for S3 too:
there only global rank 0 copies the index, a missing object is taken to be there, and each read
fetches a block of 256 MiB, which suits no shuffled documents.
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
_LOOKS = 30.0  # seconds between looks at whether the object is still the same
READERS = 8
"""Threads that read samples ahead: an answer of a store takes tens of milliseconds."""


@dataclass(frozen=True)
class RemotePair:
    """A pair whose .bin stays in the store."""

    prefix: str
    """Of the local copies of its .idx, and of an empty .bin, which Megatron-Core asks for."""
    binary: Remote
    entry: Entry
    """Of the .bin."""
    stamp: str

    def reader(self) -> "RemoteBinReader":
        """Of its tokens."""
        return RemoteBinReader(self.binary, self.entry)


class RemoteBinReader:
    """A .bin in a store; what IndexedDataset asks of its `bin_reader`. Threads may share it."""

    def __init__(self, binary: Remote, entry: Entry) -> None:
        self._binary, self._entry, self._looked = binary, entry, time.monotonic()

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """`count` ids from byte `offset` on.

        Raises:
            DataError: the object cannot be read, or is not what it was when the run started.
        """
        stop = offset + count * np.dtype(dtype).itemsize
        raw = _asked(lambda: persist(lambda: self._binary.read(offset, stop)))
        if time.monotonic() - self._looked > _LOOKS:
            self._looked = time.monotonic()
            same = _asked(lambda: persist(self._binary.entry)) == self._entry
        else:
            same = True
        if len(raw) == stop - offset and same:
            return np.frombuffer(raw, dtype)
        raise DataError(
            f"{self._binary} was changed while this run reads it; restore the data or make it "
            "again, and start the run again: it goes on from its newest checkpoint"
        )


def remote_pair(address: str, cache: Path) -> RemotePair:
    """Copy the index of a pair to `cache`, if need be.

    Raises:
        DataError: an object is missing or cannot be read, or the cache cannot be written.
    """
    binary, index = Remote(f"{address}.bin"), Remote(f"{address}.idx")
    entries = []
    for path in (binary, index):
        entry = _entry(path)
        if entry is None:
            raise DataError(
                f"{path} does not exist; data.blend takes prefixes of .bin/.idx without the ending"
            )
        entries.append(entry)
    held, wanted = entries

    def build(folder: Path) -> None:
        _copy(index, wanted, folder / f"{NAME}.idx")
        (folder / f"{NAME}.bin").touch()
        with opened_parts(folder / f"{NAME}.idx") as (copied,):
            tokens = held.size, lambda at, count: _read(binary, at, count)
            (folder / "stamp").write_text(stamp([tokens, copied]))
        _unchanged(binary, held)

    key = [address, [held.size, held.mark], [wanted.size, wanted.mark]]
    folder = built_once(cache / "objects" / digest(key), build)
    mark = (folder / "stamp").read_text()
    return RemotePair(str(folder / NAME), binary, held, mark)


def beside(entry: str, cache: str) -> str:
    """Local prefix of .json and .tokenizer.json of an entry of `data.blend`, as far as in reach."""
    if not is_address(entry):
        return str(Path(entry).expanduser())
    try:
        return described(entry, cache_folder(cache))
    except DataError:  # out of reach is like not there any more
        return entry


def described(address: str, cache: Path) -> str:
    """Prefix of local copies of .json and .tokenizer.json of a pair, as far as they are there."""
    paths = [Remote(f"{address}{ending}") for ending in (".json", ".tokenizer.json")]
    found = [(path, entry) for path in paths if (entry := _entry(path, optional=True))]

    def build(folder: Path) -> None:
        for path, entry in found:
            _copy(path, entry, folder / (NAME + path.address.removeprefix(address)))

    key = [[path.address, entry.size, entry.mark] for path, entry in found]
    return str(built_once(cache / "objects" / digest([address, key]), build) / NAME)


def _entry(path: Remote, optional: bool = False) -> Entry | None:
    try:
        return path.entry()
    except FileNotFoundError:
        return None
    except OSError as error:
        # Whoever may not list a bucket is told so where there is nothing.
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
        raise DataError(f"{path} was changed while it was read; start again (data.blend)")


def _read(path: Remote, at: int, count: int) -> bytes:
    return _asked(lambda: persist(lambda: path.read(at, at + count)))


def _asked[T](work: Callable[[], T]) -> T:
    """An OSError here is not one of the cache."""
    try:
        return work()
    except OSError as error:
        raise DataError(f"{error} (data.blend)") from None
