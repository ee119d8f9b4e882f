"""Pieces of documents in the rows of a dataset: positions, and what they are on average.

A row of S + 1 tokens is cut from documents that follow one another; a document that does not fit
goes on in the next row, as a piece of its own. Positions count from the beginning of a piece.

Legend: S tokens of a sequence, P pieces in a row.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


def positions(lengths_P: np.ndarray) -> np.ndarray:
    """int64 [S + 1]: each token's place in its piece; lengths are of all tokens of a row."""
    ends_P = np.cumsum(lengths_P, dtype=np.int64)
    return np.arange(ends_P[-1]) - np.repeat(ends_P - lengths_P, lengths_P)


def pieces(position_S: np.ndarray) -> np.ndarray:
    """int64 [P]: tokens of each piece, of the positions of a sequence."""
    begins_P = np.flatnonzero(position_S == 0)
    return np.diff(begins_P, append=len(position_S))


@dataclass(frozen=True)
class Packing:
    """How sequences are packed, on average over some of them."""

    sequences: int
    """That were looked at."""
    documents: float
    """Pieces of documents in a sequence."""
    most: int
    """In one of the sequences."""
    length: float
    """Tokens of a piece."""
    saved: float
    """Of the pairs of a query and a key that causal attention sees in a whole sequence, of 1."""

    def __str__(self) -> str:
        return (
            f"{self.documents:.1f} documents a sequence (most {self.most}) of {self.length:,.0f} "
            f"tokens; {self.saved:.0%} of causal attention saved"
        )


def packing(position_rows: Iterable[np.ndarray]) -> Packing:
    """Of sequences of equal length, at least one, by the positions of their tokens."""
    counts, tokens, pairs, whole = [], 0, 0, 0
    for position_S in position_rows:
        counts.append(len(pieces(position_S)))
        tokens += len(position_S)
        pairs += int(position_S.sum()) + len(position_S)  # a token sees those before it, and itself
        whole += len(position_S) * (len(position_S) + 1) // 2
    total = sum(counts)
    return Packing(len(counts), total / len(counts), max(counts), tokens / total, 1 - pairs / whole)
