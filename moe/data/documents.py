"""Documents of .jsonl, .txt and .parquet files, and their ids: what a worker of prepare_data does.

Files are cut into shards; `write_shard` turns one into ids, document lengths and counts on disk.
Invariants: the shards in order hold the documents in order, wherever the cuts fall; a shard whose
lengths file exists is complete. Imports neither torch nor Megatron-Core: workers start fast.
"""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from phalanx.moe.data.host_cache import DataError, sync

KINDS = {".jsonl": "jsonl", ".txt": "txt", ".parquet": "parquet"}
BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Recipe:
    """How text becomes ids; the same for all workers."""

    tokenizer: str
    """Path of tokenizer.json; empty for bytes."""
    eod: int
    dtype: str
    key: str
    lines: bool


@dataclass(frozen=True)
class Piece:
    """A part of an input file: bytes [start, stop), or row groups of a Parquet file."""

    path: str
    kind: str
    start: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """What one task of a worker covers: a part of a large file, or several small files."""

    number: int
    pieces: tuple[Piece, ...]
    size: int
    """Bytes of input, for the progress bar."""

    def ids(self, folder: Path) -> Path:
        return folder / f"{self.number:07d}.bin"

    def counts(self, folder: Path) -> Path:
        """What `Counts.read` reads."""
        return folder / f"{self.number:07d}.json"

    def lengths(self, folder: Path) -> Path:
        """Written last: where it exists the shard is complete."""
        return folder / f"{self.number:07d}.npy"


@dataclass
class Counts:
    """What a shard saw besides documents."""

    text_bytes: int = 0
    """UTF-8 bytes of the documents."""
    empty: int = 0
    """Rows without text."""
    without_tokens: int = 0
    """Rows whose text the tokenizer makes nothing of."""

    @staticmethod
    def read(path: Path) -> "Counts":
        return Counts(**json.loads(path.read_bytes()))


def make_shards(files: Sequence[tuple[str, str]], recipe: Recipe, chunk: int) -> list[Shard]:
    """Cut large files, put small ones together; a function of files and chunk size only."""
    shards: list[Shard] = []
    pieces: list[Piece] = []
    size = 0
    for path, kind in files:
        for piece, bytes_in in cut(path, kind, recipe, chunk):
            pieces.append(piece)
            size += bytes_in
            if size >= chunk:
                shards.append(Shard(len(shards), tuple(pieces), size))
                pieces, size = [], 0
    if pieces:
        shards.append(Shard(len(shards), tuple(pieces), size))
    return shards


def cut(path: str, kind: str, recipe: Recipe, chunk: int) -> Iterator[tuple[Piece, int]]:
    """Pieces of one file, each with its bytes."""
    if kind == "parquet":
        metadata = open_parquet(path, recipe.key).metadata
        for group in range(metadata.num_row_groups):
            yield Piece(path, kind, group, group + 1), metadata.row_group(group).total_byte_size
        return
    size = os.stat(path).st_size
    if kind == "txt" and not recipe.lines:
        yield Piece(path, kind, 0, size), size
        return
    for start in range(0, size, chunk):
        stop = min(start + chunk, size)
        yield Piece(path, kind, start, stop), stop - start


@functools.cache
def load_tokenizer(path: str) -> Tokenizer:
    """A tokenizer that neither truncates nor pads, whatever its file says."""
    try:
        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"{path} is not a tokenizer.json of Hugging Face: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def write_shard(shard: Shard, recipe: Recipe, folder: Path) -> int:
    """Write one shard; it appears complete or not at all. Returns its bytes of input.

    A text without tokens is no document, as in Megatron-LM's tools/preprocess_data.py: it would be
    an end of nothing.
    """
    end = np.array([recipe.eod], recipe.dtype).tobytes()
    ids, lengths, counts = shard.ids(folder), shard.lengths(folder), shard.counts(folder)
    made: list[int] = []
    seen = Counts()
    with Path(f"{ids}.tmp").open("wb") as stream:
        texts = (text for piece in shard.pieces for text in read(piece, recipe))
        for batch in batches(with_text(texts, seen)):
            for text, row in zip(batch, encode(batch, recipe), strict=True):
                if not len(row):
                    seen.without_tokens += 1
                    continue
                stream.write(row.tobytes())
                stream.write(end)
                made.append(len(row) + 1)
                seen.text_bytes += len(text.encode())
    with Path(f"{lengths}.tmp").open("wb") as stream:
        np.save(stream, np.array(made, np.int32))
    Path(f"{counts}.tmp").write_text(json.dumps(asdict(seen)))
    for path in (ids, counts, lengths):
        sync(Path(f"{path}.tmp"))
        os.replace(f"{path}.tmp", path)
    return shard.size


def with_text(texts: Iterator[str], seen: Counts) -> Iterator[str]:
    """Those that are not empty; the others are counted."""
    for text in texts:
        if text:
            yield text
        else:
            seen.empty += 1


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Documents in lists of about a million characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode(texts: list[str], recipe: Recipe) -> Iterator[np.ndarray]:
    """Ids of each text.

    As in Hugging Face's libraries, a special token spelled out in a text becomes that token.
    """
    if not recipe.tokenizer:
        for text in texts:
            yield np.frombuffer(text.encode(), np.uint8).astype(recipe.dtype)
        return
    tokenizer = load_tokenizer(recipe.tokenizer)
    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        yield np.array(encoding.ids, recipe.dtype)


def read(piece: Piece, recipe: Recipe) -> Iterator[str]:
    """Documents of a piece. Raises DataError that names file and line."""
    if piece.kind == "parquet":
        yield from read_parquet(piece, recipe.key)
    elif piece.kind == "txt" and not recipe.lines:
        yield decode(Path(piece.path).read_bytes(), piece.path)
    else:
        for start, line in read_lines(piece):
            text = line.rstrip(b"\r\n")
            if piece.kind == "txt":
                yield decode(text, piece.path, start)
            elif text.strip():
                yield parse_json(text, recipe.key, piece.path, start)


def read_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Offset and content of the lines that start inside the piece."""
    with open(piece.path, "rb") as stream:
        if piece.start:
            stream.seek(piece.start - 1)
            stream.readline()  # ends the line that the piece before has
        while (start := stream.tell()) < piece.stop:
            yield start, stream.readline()


def place(path: str, start: int | None) -> str:
    """path:line of a byte offset; lines are counted only when there is an error to report."""
    if start is None:
        return path
    line = 1
    with open(path, "rb") as stream:
        while start > 0:
            block = stream.read(min(start, 1 << 22))
            line += block.count(b"\n")
            start -= len(block)
    return f"{path}:{line}"


def decode(raw: bytes, path: str, start: int | None = None) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{place(path, start)}: not UTF-8 at byte {error.start}") from None


def parse_json(line: bytes, key: str, path: str, start: int) -> str:
    """The text of a JSON line; null counts as empty."""
    try:
        record = json.loads(decode(line, path, start))
    except json.JSONDecodeError as error:
        raise DataError(f"{place(path, start)}: not JSON: {error}") from None
    if not isinstance(record, dict) or key not in record:
        keys = ", ".join(record) if isinstance(record, dict) else "none"
        raise DataError(f"{place(path, start)}: no key {key!r} (keys: {keys}); give --key")
    text = record[key]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{place(path, start)}: {key!r} is {type(text).__name__}, not text")
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{place(path, start)}: {key!r} has half of a surrogate pair at character {error.start}"
        ) from None
    return text or ""


def open_parquet(path: str, key: str) -> Any:
    """pyarrow.parquet.ParquetFile that has the text column."""
    from pyarrow import ArrowException, parquet

    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is not a Parquet file: {error}") from None
    names = file.schema_arrow.names
    if key not in names:
        raise DataError(f"{path}: no column {key!r} (columns: {', '.join(names)}); give --key")
    return file


def read_parquet(piece: Piece, key: str) -> Iterator[str]:
    """Values of the text column; null counts as empty."""
    groups = list(range(piece.start, piece.stop))
    file = open_parquet(piece.path, key)
    for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[key]):
        for value in batch.column(0).to_pylist():
            if value is not None and not isinstance(value, str):
                kind = type(value).__name__
                raise DataError(f"{piece.path}: column {key!r} is {kind}, not text; give --key")
            yield value or ""
