"""Input files of a command line, by their names, and their bytes, compressed (.gz, .zst) or not."""

import gzip
import io
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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


_ABOUT = (
    *("readme", "license", "licence", "copying", "notice", "authors", "contributing", "citation"),
    *("changelog", "requirements", "dataset_info", "dataset_infos", "dataset_dict", "metadata"),
)
_OF_MODELS = (
    *("tokenizer", "tokenizer_config", "special_tokens_map", "added_tokens", "vocab"),
    *("config", "generation_config", "preprocessor_config"),
)
_SHOWN = 3


@dataclass
class Inputs:
    """Input files in their order, and files that were left out."""

    files: list[str] = field(default_factory=list)  # absolute paths
    left: dict[str, list[str]] = field(default_factory=dict)  # by reason; folders end in a slash

    def report(self) -> Iterator[str]:
        """Lines on the files that are used and left out."""
        kinds = Counter(ending(path) for path in self.files)
        taken = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        size = sum(os.stat(path).st_size for path in self.files)
        yield f"taken: {taken} ({size / 1e6:,.1f} MB)"
        if self.left:
            yield f"left out: {self.left_out()}"

    def left_out(self) -> str:
        """Counts by reason, each with some names, in words."""
        parts = []
        for reason, names in self.left.items():
            shown = ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)
            parts.append(f"{len(names):,} {reason} ({shown})")
        return ", ".join(parts) or "nothing"


def find_inputs(inputs: Sequence[str]) -> Inputs:
    """Input files in the order of the command line; those of folders are sorted.

    Raises:
        DataError: one does not exist, cannot be read as text, or a folder has no usable file.
    """
    result = Inputs()
    for entry in inputs:
        path = Path(entry).expanduser().absolute()
        if path.is_dir():
            before = len(result.files)
            result.files += map(str, _of_folder(path, result.left))
            if len(result.files) == before:
                raise DataError(f"{path} holds no {NAMES} files; left out: {result.left_out()}")
        elif not path.is_file():
            raise DataError(f"{path} does not exist")
        elif kind_of(path) is None:
            raise DataError(f"{path} is none of {NAMES}")
        else:
            result.files.append(str(path))
    return result


def _of_folder(root: Path, left: dict[str, list[str]]) -> list[Path]:
    taken: list[Path] = []
    for folder, folders, names in os.walk(root):
        parent = Path(folder)
        entries = [(name, _skipped_folder(parent / name)) for name in sorted(folders)]
        folders[:] = [name for name, reason in entries if not reason]
        entries += [(name, _not_text(parent / name)) for name in sorted(names)]
        for name, reason in entries:
            path = parent / name
            if reason:
                slash = "/" * path.is_dir()
                left.setdefault(reason, []).append(f"{path.relative_to(root)}{slash}")
            elif name in names:
                taken.append(path)
    return sorted(taken)


def _skipped_folder(folder: Path) -> str:
    """Why a folder is left out; empty if it is searched."""
    if folder.name.startswith("."):
        return "hidden"
    if folder.name.endswith(".parts") and (folder / "plan").is_file():
        return "of prepared data"
    return "links to folders" if folder.is_symlink() else ""


def _not_text(path: Path) -> str:
    """Why a file of a folder is left out; empty if it is taken."""
    name = path.name.lower()
    stem = name.partition(".")[0]
    if name.startswith("."):
        return "hidden"
    if kind_of(path) is None:
        return "of other kinds"
    if stem in _ABOUT and name.endswith((".txt", ".json")):
        return "about the data"
    if name.endswith(".tokenizer.json") or (path.with_suffix(".idx").is_file() and _json(path)):
        return "of prepared data"
    if stem in _OF_MODELS and _json(path):
        return "of a tokenizer or model"
    return "" if path.is_file() else "no files"


def _json(path: Path) -> bool:
    return path.suffix == ".json"
