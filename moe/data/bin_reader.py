"""Reads tokens of a .bin file, and notices when somebody changes it under a run.

Takes the place of Megatron-Core's memory map, whose reader dies of SIGBUS without a word when the
file is cut: a read through the open file returns less, and that can be told.
"""

import os
from pathlib import Path

import numpy as np

from phalanx.moe.data.host_cache import DataError


class BinReader:
    """One open .bin file; what IndexedDataset asks of its `bin_reader`. Threads may share it."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("rb", buffering=0)
        self._mark = self._seen()

    def read(self, dtype: type[np.number], count: int, offset: int) -> np.ndarray:
        """`count` ids from byte `offset` on.

        Raises:
            DataError: the file cannot be read, or is not what it was when the run started.
        """
        size = count * np.dtype(dtype).itemsize
        try:
            raw = os.pread(self._file.fileno(), size, offset)
            if len(raw) == size and self._seen() == self._mark:
                return np.frombuffer(raw, dtype)
        except OSError as error:
            raise DataError(f"{self._path} cannot be read: {error}") from None
        raise DataError(
            f"{self._path} was changed while this run reads it; restore the data or make it again, "
            "and start the run again: it goes on from its newest checkpoint"
        )

    def _seen(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns
