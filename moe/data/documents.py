"""Documents of text files and their ids: the work of a prepare_data worker.

Invariants: the shards of the files, in order, hold the documents in order, for any split; a shard
whose lengths file exists is complete. Imports neither torch nor Megatron-Core, so that workers
start fast.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from phalanx.moe.data.host_cache import sync
from phalanx.moe.data.text_rows import Bad, Limit, Piece, Reading, cut, rows
from phalanx.moe.data.tokenizer.encoder import encoder_of

BATCH_CHARACTERS = 1 << 20


@dataclass(frozen=True)
class Supervised:
    """Rows of prompts and answers (`extras.chat`), of which the answers count in a loss."""

    rows: str  # `messages` or `pairs`
    sequence: int  # tokens of the sequences that whole rows are packed into
    long: str  # longer rows: `cut` or `drop`
    template: str = ""  # text of the chat template
    tokens: dict[str, str] = field(default_factory=dict)  # special ones that it may name


@dataclass(frozen=True)
class Tokenization:
    """Conversion of text to ids; the same for all workers."""

    tokenizer: str  # path of tokenizer.json; empty for bytes
    eod: int
    dtype: str
    reading: Reading
    special_text: str  # `choice` of the encoder
    supervised: Supervised | None = None  # None for text


@dataclass(frozen=True)
class Shard:
    """Input of one task of a worker: a part of a large file, or several small files."""

    number: int
    pieces: tuple[Piece, ...]
    size: int  # bytes of input, for the progress bar

    def ids(self, folder: Path) -> Path:
        return folder / f"{self.number:07d}.bin"

    def counts(self, folder: Path) -> Path:
        """File that `Counts.read` reads."""
        return folder / f"{self.number:07d}.json"

    def lengths(self, folder: Path) -> Path:
        """File of document lengths, which is written last: if it exists the shard is complete."""
        return folder / f"{self.number:07d}.npy"


@dataclass
class Counts:
    """Counts of a shard besides its documents."""

    text_bytes: int = 0  # UTF-8 bytes of the documents
    empty: int = 0  # rows without text
    without_tokens: int = 0  # rows whose text has no tokens
    bad: list[Bad] = field(default_factory=list)  # broken rows, which are left out
    spelled: dict[str, int] = field(default_factory=dict)  # special tokens that documents spell
    spelling: int = 0  # documents that spell any
    cut: int = 0  # supervised rows that were cut to the length of a sequence
    dropped: int = 0  # supervised rows that were left out, as they are longer

    @staticmethod
    def read(path: Path) -> "Counts":
        content = json.loads(path.read_bytes())
        return Counts(**content | {"bad": [Bad(**each) for each in content["bad"]]})


def chat_template_beside(prefix: str) -> Path:
    """Chat template of the rows of prefix.bin, if they are chats."""
    return Path(f"{prefix}.chat_template.jinja")


def make_shards(files: Sequence[str], reading: Reading, chunk: int) -> list[Shard]:
    """Split large files and group small ones; depends on files and chunk size only."""
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


def write_shard(shard: Shard, recipe: Tokenization, folder: Path, limit: Limit) -> int:
    """Write one shard atomically. Returns its bytes of input.

    A text without tokens is no document, as in Megatron-LM's tools/preprocess_data.py. Raises
    DataError if the shard has more broken rows than the full input may have.
    """
    end = np.array([recipe.eod], recipe.dtype).tobytes()
    encoder = encoder_of(recipe.tokenizer, (recipe.eod,), recipe.special_text)
    ids = shard.ids(folder)
    document_lengths: list[int] = []
    total, spelled = Counts(), Counter[str]()
    with Path(f"{ids}.tmp").open("wb") as stream:
        pieces, refused = shard.pieces, encoder.refused
        texts = (row for piece in pieces for row in rows(piece, recipe.reading, refused))
        for batch in batches(with_text(texts, total, limit)):
            for text, row in zip(batch, encoder.encode(batch), strict=True):
                if not len(row):
                    total.without_tokens += 1
                    continue
                stream.write(row.astype(recipe.dtype).tobytes())
                stream.write(end)
                document_lengths.append(len(row) + 1)
                total.text_bytes += len(text.encode())
                found = [token for token, _ in encoder.spelled(text)]
                spelled.update(found)
                total.spelling += bool(found)
    total.spelled = dict(spelled)
    finish_shard(shard, folder, document_lengths, total, (ids,))
    return shard.size


def finish_shard(
    shard: Shard, folder: Path, lengths: Sequence[int], counts: Counts, files: Sequence[Path]
) -> None:
    """Write lengths and counts of a shard, then give it and its `files` their names."""
    last, counted = shard.lengths(folder), shard.counts(folder)
    with Path(f"{last}.tmp").open("wb") as stream:
        np.save(stream, np.array(lengths, np.int32))
    Path(f"{counted}.tmp").write_text(json.dumps(asdict(counts)))
    for path in (*files, counted, last):  # the lengths last, as they say that all is there
        sync(Path(f"{path}.tmp"))
        os.replace(f"{path}.tmp", path)


def with_text(texts: Iterator[str | Bad], counts: Counts, limit: Limit) -> Iterator[str]:
    """Texts that are not empty; empty and broken rows are counted, up to a limit for the latter."""
    for text in texts:
        if isinstance(text, Bad):
            counts.bad.append(text)
            limit.check(counts.bad)
        elif text:
            yield text
        else:
            counts.empty += 1


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Lists of texts of about a million characters."""
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
