"""Kinds of input files by their names, and their bytes, compressed (.gz, .zst) or not."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from phalanx.moe.data.host_cache import DataError

KINDS = {".jsonl": "jsonl", ".json": "json", ".txt": "txt", ".parquet": "parquet"}
PACKED = (".gz", ".zst")
NAMES = ".jsonl, .json, .txt (or .gz, .zst of these) and .parquet"


def ending(path: str | Path) -> str:
    """Ending of a name, such as `.jsonl.gz`, in lower case; empty for an unknown kind."""
    name = Path(path).name.lower()
    packed = next((end for end in PACKED if name.endswith(end)), "")
    kind = Path(name.removesuffix(packed)).suffix
    return kind + packed if kind in KINDS and not (packed and kind == ".parquet") else ""


def kind_of(path: str | Path) -> str | None:
    """`jsonl`, `json`, `txt` or `parquet`; None for another file."""
    return KINDS.get(ending(path).removesuffix(".gz").removesuffix(".zst"))


def is_packed(path: str | Path) -> bool:
    """Is a file compressed, so that it can only be read from its start?"""
    return str(path).lower().endswith(PACKED)


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file; a compressed one does not support seek.

    Raises:
        DataError: it is compressed, and damaged.
        OSError: it cannot be read.
    """
    try:
        with _open(path) as stream:
            yield stream
    except (EOFError, zlib.error) as error:
        raise _damaged(path, error) from None
    except OSError as error:
        if error.errno is not None or not is_packed(path):
            raise
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception) -> DataError:
    return DataError(f"{path} cannot be decompressed: {error}; download or compress it again")


def _open(path: str) -> Any:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if path.lower().endswith(".zst"):
        with open(path, "rb"):  # its errors name the file, pyarrow's do not
            return io.BufferedReader(arrow(path).input_stream(path, compression="zstd"), 1 << 20)
    return open(path, "rb")


def arrow(path: str) -> Any:
    """The pyarrow module, which reads Parquet and zstd. Raises DataError without it."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{path} needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    return pyarrow
