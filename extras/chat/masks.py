"""Loss masks of training data: a .bin/.idx pair of flags beside that of the tokens.

`prefix.mask` has the documents of `prefix`, a uint8 in place of each token. Datasets are shuffled
and cut by lengths and seed alone, so that row i of the flags belongs to row i of the tokens, also
in a blend. The file is read by the same code as tokens, from an object store too.

Legend: S tokens of a sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from phalanx.configs.addresses import is_address
from phalanx.configs.schema import DataConfig
from phalanx.moe.data.blend import opened, parse_blend
from phalanx.moe.data.host_cache import DataError, digest
from phalanx.moe.data.sources import Source
from phalanx.moe.data.token_files import Corpus

if TYPE_CHECKING:
    from phalanx.moe.data.loader import Samples

COUNTS, BEGINS = 1, 2
"""Bits of a flag: the token counts where it is a label; it is the first one of its row."""
ENDING = ".mask"


def check(corpus: Corpus, cfg: DataConfig) -> None:
    """Check that the loss mask of a pair is there and fits it.

    Raises:
        DataError: it is missing or damaged, of other tokens, or for sequences of another length.
    """
    prefix, remedy = f"{corpus.prefix}{ENDING}", "prepare the data again, or set data.loss_mask="
    for file in (f"{prefix}.bin", f"{prefix}.idx"):
        if not is_address(prefix) and not Path(file).is_file():
            raise DataError(
                f"{file} is missing, which has the loss mask of {corpus.prefix}.bin: copy it "
                f"there, {remedy}false"
            )
    mask = opened(prefix, cfg)
    if mask.dtype != "uint8" or not np.array_equal(mask.lengths, corpus.lengths):
        raise DataError(
            f"{prefix}.bin is not the loss mask of {corpus.prefix}.bin: {_size(mask)}, where the "
            f"tokens are {_size(corpus)}; {remedy}false"
        )
    packed = corpus.sidecar.packed if corpus.sidecar is not None else 0
    if packed and cfg.sequence_length % packed:
        raise DataError(
            f"data.sequence_length={cfg.sequence_length} would cut the rows of {corpus.prefix}.bin,"
            f" which are packed into sequences of {packed} tokens; set data.sequence_length="
            f"{packed}, or prepare them with --sequence-length {cfg.sequence_length}"
        )


def _size(corpus: Corpus) -> str:
    tokens = int(corpus.lengths.sum(dtype=np.int64))
    return f"{tokens:,} of {corpus.dtype} in {corpus.documents:,} documents"


def masked_rows(
    cfg: DataConfig,
    build: "Callable[[DataConfig], Sequence[Samples]]",
    rows: "Sequence[Samples]",
) -> "list[MaskedRows]":
    """Rows of each part that know which of their labels count. Raises DataError.

    Args:
        build: makes the rows of each part from its pairs.
        rows: what it made of `cfg`.
    """
    held_out = _flags_of(cfg.validation, replace(cfg, stages=[]))
    flags = replace(cfg, blend=_flags_of(cfg.blend, cfg), validation=held_out)
    return [MaskedRows(*pair) for pair in zip(rows, build(flags), strict=True)]


def _flags_of(entries: list[str], cfg: DataConfig) -> list[str]:
    """Entries of a blend with the mask of each pair in its place, or the pair if it has none."""
    if not entries:
        return []
    prefixes, weights = parse_blend(replace(cfg, blend=entries))
    described = [opened(prefix, cfg).sidecar for prefix in prefixes]
    named = [
        prefix + ENDING if sidecar is not None and sidecar.labels else prefix
        for prefix, sidecar in zip(prefixes, described, strict=True)
    ]
    if weights is None:
        return named
    return [str(each) for pair in zip(weights, named, strict=True) for each in pair]


class MaskedRows:
    """A dataset (`moe.data.loader.Samples`) that knows which labels count.

    Args:
        rows: tokens.
        flags: flags of the same rows; anything for rows of a source without a mask.
    """

    def __init__(self, rows: "Samples", flags: "Samples") -> None:
        self._rows, self._flags = rows, flags
        self.fingerprint = digest([rows.fingerprint, flags.fingerprint])
        self.sources: Sequence[Source] = rows.sources
        self.readers: int = getattr(rows, "readers", 1)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._rows[index]

    def source(self, index: int) -> int:
        return self._rows.source(index)

    def counted(self, index: int) -> np.ndarray:
        """bool [S + 1]: tokens of a row that count where they are labels."""
        if not self._masked(index):
            return np.ones_like(self._rows[index], bool)
        return self._flags[index] & COUNTS != 0

    def positions(self, index: int) -> np.ndarray:
        """int64 [S + 1]: positions of tokens in their documents, or in the rows packed into one."""
        position = self._rows.positions(index)
        if not self._masked(index):
            return position
        return _restarted(position, self._flags[index])

    def _masked(self, index: int) -> bool:
        return self.sources[self.source(index)].labels < 1


def masked_text(
    corpus: Corpus, count: int, position_N: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Tokens that count among the first `count` of a pair on a disk, and positions in their rows.

    Args:
        position_N: positions in documents, int64; None if rows see each other.

    Returns:
        bool [N], and int64 [N] or None.

    Raises:
        DataError: the mask is missing, or does not fit.
    """
    assert corpus.sidecar is not None
    check(corpus, DataConfig(sequence_length=corpus.sidecar.packed or 1))
    flags_N = np.fromfile(f"{corpus.prefix}{ENDING}.bin", np.uint8, count)
    counted_N = flags_N & COUNTS != 0
    return counted_N, None if position_N is None else _restarted(position_N, flags_N)


def _restarted(position_N: np.ndarray, flags_N: np.ndarray) -> np.ndarray:
    """Positions that also start over where a row begins."""
    number_N = np.arange(len(position_N))
    begins_N = (position_N == 0) | (flags_N & BEGINS != 0)
    return number_N - np.maximum.accumulate(np.where(begins_N, number_N, 0))
