"""Documents of text files, and their ids: what a worker of prepare_data does.

Files are cut into shards; `write_shard` turns one into ids, document lengths and counts on disk.
Invariants: the shards in order hold the documents in order, wherever the cuts fall; a shard whose
lengths file exists is complete. Imports neither torch nor Megatron-Core: workers start fast.
"""

import functools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from phalanx.moe.data.bad_rows import Bad, Limit
from phalanx.moe.data.host_cache import DataError, sync
from phalanx.moe.data.text_rows import Piece, Reading, cut, rows

BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Tokenization:
    """How text becomes ids; the same for all workers."""

    tokenizer: str
    """Path of tokenizer.json; empty for bytes."""
    eod: int
    dtype: str
    reading: Reading


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
    bad: list[Bad] = field(default_factory=list)
    """Broken rows, which are left out."""

    @staticmethod
    def read(path: Path) -> "Counts":
        content = json.loads(path.read_bytes())
        return Counts(**content | {"bad": [Bad(**each) for each in content["bad"]]})


def make_shards(files: Sequence[str], reading: Reading, chunk: int) -> list[Shard]:
    """Cut large files, put small ones together; a function of files and chunk size only."""
    shards: list[Shard] = []
    pieces: list[Piece] = []
    size = 0
    for path in files:
        for piece, bytes_in in cut(path, reading, chunk):
            pieces.append(piece)
            size += bytes_in
            if size >= chunk:
                shards.append(Shard(len(shards), tuple(pieces), size))
                pieces, size = [], 0
    if pieces:
        shards.append(Shard(len(shards), tuple(pieces), size))
    return shards


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


def write_shard(shard: Shard, recipe: Tokenization, folder: Path, limit: Limit) -> int:
    """Write one shard; it appears complete or not at all. Returns its bytes of input.

    A text without tokens is no document, as in Megatron-LM's tools/preprocess_data.py: it would be
    an end of nothing. Raises DataError if it has more broken rows than a whole input may have.
    """
    end = np.array([recipe.eod], recipe.dtype).tobytes()
    ids, lengths, counts = shard.ids(folder), shard.lengths(folder), shard.counts(folder)
    made: list[int] = []
    seen = Counts()
    with Path(f"{ids}.tmp").open("wb") as stream:
        found = (row for piece in shard.pieces for row in rows(piece, recipe.reading))
        for batch in batches(with_text(found, seen, limit)):
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


def with_text(found: Iterator[str | Bad], seen: Counts, limit: Limit) -> Iterator[str]:
    """Those that are not empty; the others are counted, up to a limit for broken rows."""
    for text in found:
        if isinstance(text, Bad):
            seen.bad.append(text)
            limit.check(seen.bad)
        elif text:
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


def encode(texts: list[str], recipe: Tokenization) -> Iterator[np.ndarray]:
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
