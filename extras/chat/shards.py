"""Supervised rows of a prepare_data worker, and their packing into the output.

A shard has ids and lengths of its rows, as one of text, and a file of flags: a byte a token. The
output has one document a sequence, of whole rows and padding, and its loss mask.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from phalanx.configs.knobs import pluralize
from phalanx.extras.chat.masks import BEGINS, COUNTS, ENDING
from phalanx.extras.chat.packing import packed
from phalanx.extras.chat.rows import Row, RowEncoder
from phalanx.moe.data.documents import Counts, Shard, Supervised, Tokenization, finish_shard
from phalanx.moe.data.text_rows import Bad, Limit, rows
from phalanx.moe.data.token_files import Sidecar, write_index


def write_shard(shard: Shard, recipe: Tokenization, folder: Path, limit: Limit) -> int:
    """Write one shard atomically. Returns its bytes of input.

    Raises DataError if the shard has more broken rows than the full input may have, or if the
    template cannot be read.
    """
    chosen = recipe.supervised
    assert chosen is not None
    encoder = RowEncoder(recipe, chosen)
    ids, flags = shard.ids(folder), _flags(shard, folder)
    row_lengths, total = list[int](), Counts()
    found = (row for piece in shard.pieces for row in rows(piece, recipe.reading, encoder.refused))
    with Path(f"{ids}.tmp").open("wb") as stream, Path(f"{flags}.tmp").open("wb") as marks:
        for text in _records(found, total, limit):
            if (row := _fitting(encoder.row(text), chosen, total)) is None:
                continue
            row_ids, counted = row
            flag = np.where(counted, np.uint8(COUNTS), np.uint8(0))
            flag[0] |= BEGINS
            stream.write(row_ids.astype(recipe.dtype).tobytes())
            marks.write(flag.tobytes())
            row_lengths.append(len(row_ids))
    finish_shard(shard, folder, row_lengths, total, (ids, flags))
    return shard.size


def _flags(shard: Shard, folder: Path) -> Path:
    return shard.ids(folder).with_suffix(".flags")


def _records(found: Iterator[str | Bad], total: Counts, limit: Limit) -> Iterator[str]:
    for row in found:
        if isinstance(row, Bad):
            total.bad.append(row)
            limit.check(total.bad)
        else:
            yield row


def _fitting(row: Row, chosen: Supervised, total: Counts) -> Row | None:
    """A row no longer than a sequence; None if it is left out. Both are counted."""
    ids, counted = row
    if len(ids) <= chosen.sequence:
        return row
    ids, counted = ids[: chosen.sequence], counted[: chosen.sequence]
    if chosen.long == "drop" or not counted.any():
        total.dropped += 1
        return None
    total.cut += 1
    return ids, counted


class Output(NamedTuple):
    """Packed rows: what describes them, and lines for the user."""

    lengths: np.ndarray  # tokens of each document, int32
    described: Sidecar
    lines: list[str]


def join(shards: Sequence[Shard], recipe: Tokenization, described: Sidecar, folder: Path) -> Output:
    """Pack the rows of all shards into joined.bin, joined.mask.bin and joined.mask.idx."""
    chosen = recipe.supervised
    assert chosen is not None
    lengths = np.concatenate([np.zeros(0, np.int32), *(np.load(s.lengths(folder)) for s in shards)])
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    ids = _joined([s.ids(folder) for s in shards], np.dtype(recipe.dtype))
    flags = _joined([_flags(s, folder) for s in shards], np.dtype(np.uint8))
    sequences, labels = packed(lengths, chosen.sequence), 0
    mask = folder / f"joined{ENDING}.bin"
    with (folder / "joined.bin").open("wb") as tokens, mask.open("wb") as marks:
        for numbers in sequences:
            id_S = np.full(chosen.sequence, recipe.eod, recipe.dtype)
            flag_S = np.zeros(chosen.sequence, np.uint8)
            at = 0
            for row in numbers:
                start, length = int(starts[row]), int(lengths[row])
                id_S[at : at + length] = ids[start : start + length]
                flag_S[at : at + length] = flags[start : start + length]
                at += length
            tokens.write(id_S.tobytes())
            marks.write(flag_S.tobytes())
            labels += int(np.count_nonzero(flag_S & COUNTS))
    whole = np.full(len(sequences), chosen.sequence, np.int32)
    write_index(mask.with_suffix(".idx"), "uint8", whole)
    described = replace(described, labels=labels, packed=chosen.sequence)
    return Output(whole, described, list(_lines(lengths, whole, labels, shards, folder)))


def _joined(files: Sequence[Path], dtype: np.dtype) -> np.ndarray:
    """Contents of files one after another, mapped where there is one, as it may be large."""
    whole = [np.memmap(file, dtype, "r") for file in files if file.stat().st_size]
    return whole[0] if len(whole) == 1 else np.concatenate([np.zeros(0, dtype), *whole])


def _lines(
    lengths: np.ndarray, whole: np.ndarray, labels: int, shards: Sequence[Shard], folder: Path
) -> Iterator[str]:
    total = Counter[str]()
    for shard in shards:
        counts = Counts.read(shard.counts(folder))
        total.update(cut=counts.cut, dropped=counts.dropped)
    tokens, room = int(lengths.sum(dtype=np.int64)), int(whole.sum(dtype=np.int64))
    if room:
        sequences = pluralize(f"{len(whole):,}", "sequence")
        yield (
            f"{pluralize(f'{len(lengths):,}', 'row')} in {sequences} of {int(whole[0]):,} tokens, "
            f"{1 - tokens / room:.1%} padding; {labels:,} of {room:,} tokens count "
            f"({labels / room:.1%})"
        )
    if total.total():
        yield (
            f"rows longer than a sequence: {total['cut']:,} cut, {total['dropped']:,} left out "
            "(--long)"
        )
