"""Kinds of input files by their names, and their bytes, whether packed (.gz, .zst) or not."""

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
    """`.jsonl.gz` of a name, in small letters; empty where it is of no known kind."""
    name = Path(path).name.lower()
    packed = next((end for end in PACKED if name.endswith(end)), "")
    kind = Path(name.removesuffix(packed)).suffix
    return kind + packed if kind in KINDS and not (packed and kind == ".parquet") else ""


def kind_of(path: str | Path) -> str | None:
    """`jsonl`, `json`, `txt` or `parquet`; None of another file."""
    return KINDS.get(ending(path).removesuffix(".gz").removesuffix(".zst"))


def is_packed(path: str | Path) -> bool:
    """Whether a file must be read from its beginning."""
    return str(path).lower().endswith(PACKED)


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """The bytes of a file, unpacked; a packed one cannot be sought in.

    Raises:
        DataError: it is packed, and is damaged.
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
    return DataError(f"{path} cannot be unpacked: {error}; fetch or pack it again")


def _open(path: str) -> Any:
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rb")
    if path.lower().endswith(".zst"):
        with open(path, "rb"):  # whose errors name the file as others do
            return io.BufferedReader(arrow(path).input_stream(path, compression="zstd"), 1 << 20)
    return open(path, "rb")


def arrow(path: str) -> Any:
    """pyarrow, which reads Parquet and zstd."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(
            f"{path} needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    return pyarrow
