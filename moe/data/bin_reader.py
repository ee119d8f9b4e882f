"""Reads tokens of a .bin file, and detects changes of the file during a run.

Replaces Megatron-Core's memory map, whose reader is killed by SIGBUS when the file is truncated: a
read through the open file returns fewer bytes, which can be reported.
"""

import os
from pathlib import Path

import numpy as np

from phalanx.moe.data.host_cache import DataError


class BinReader:
    """An open .bin file, as `bin_reader` of IndexedDataset. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb", buffering=0)
        self._mark = self._seen()

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """`count` ids from byte `offset` on.

        Raises:
            DataError: the file cannot be read, or has changed since the run started.
        """
        size = count * np.dtype(dtype).itemsize
        try:
            raw = os.pread(self._file.fileno(), size, offset)
            if len(raw) == size and self._seen() == self._mark:
                return np.frombuffer(raw, dtype)
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error}") from None
        raise DataError(
            f"{self._path} was changed while this run reads it; restore or rebuild the data, and "
            "restart the run: it continues from its newest checkpoint"
        )

    def _seen(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns
