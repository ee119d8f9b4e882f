"""Pieces of documents in the rows of a dataset: positions, and average statistics.

A row of S + 1 tokens is cut from concatenated documents; a document that does not fit continues in
the next row, as a separate piece. Positions count from the start of a piece.

Legend: S tokens of a sequence, P pieces in a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


def positions(lengths_P: np.ndarray) -> np.ndarray:
    """Position of each token in its piece, int64 [S + 1]; lengths cover all tokens of a row."""
    ends_P = np.cumsum(lengths_P, dtype=np.int64)
    return np.arange(ends_P[-1]) - np.repeat(ends_P - lengths_P, lengths_P)


def pieces(position_S: np.ndarray) -> np.ndarray:
    """Tokens of each piece, int64 [P], from the positions of a sequence."""
    starts_P = np.flatnonzero(position_S == 0)
    return np.diff(starts_P, append=len(position_S))


@dataclass(frozen=True)
class Packing:
    """Average packing of some sequences."""

    sequences: int  # number of sequences
    documents: float  # pieces of documents per sequence
    most: int  # most pieces in one of the sequences
    length: float  # tokens per piece
    saved: float  # fraction of the query-key pairs of causal attention over full sequences

    def __str__(self) -> str:
        return (
            f"{self.documents:.1f} documents per sequence (most {self.most}) of {self.length:,.0f} "
            f"tokens; {self.saved:.0%} of causal attention saved"
        )


def packing(position_rows: Iterable[np.ndarray]) -> Packing:
    """Packing of one or more sequences of equal length, from the positions of their tokens."""
    counts, tokens, pairs, all_pairs = [], 0, 0, 0
    for position_S in position_rows:
        counts.append(len(pieces(position_S)))
        tokens += len(position_S)
        pairs += int(position_S.sum()) + len(position_S)  # a token attends to itself as well
        all_pairs += len(position_S) * (len(position_S) + 1) // 2
    total, saved = sum(counts), 1 - pairs / all_pairs
    return Packing(len(counts), total / len(counts), max(counts), tokens / total, saved)
