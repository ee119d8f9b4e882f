"""Near-duplicates of texts, by MinHash of the shingles of their characters.

A sketch has the smallest hash of each of 64 bins of the hashes of all shingles (one permutation,
arXiv 1208.1259). The share of bins in which two sketches agree estimates the Jaccard similarity.

Legend: N bytes of a text, B bins.
"""

import numpy as np

SIMILAR = 0.7  # estimated similarity from which a text counts as a near-duplicate

_BINS, _ROWS, _DOUBLINGS = 64, 4, 5
_SHINGLE = 1 << _DOUBLINGS  # characters of a shingle
_EMPTY = np.iinfo(np.uint64).max
_PRIME = 0x9E3779B97F4A7C15


def sketch(text: str) -> np.ndarray:
    """Smallest hashes of the shingles of a text, uint64 [B]; runs of white space are one space."""
    data_N = np.frombuffer(" ".join(text.split()).lower().encode(), np.uint8)
    hash_N, power = data_N.astype(np.uint64) + np.uint64(1), _PRIME
    if len(hash_N) < _SHINGLE:
        hash_N = np.pad(hash_N, (0, _SHINGLE - len(hash_N)))
    for i in range(_DOUBLINGS):  # hashes of 2, 4, ... characters
        width = 1 << i
        hash_N = hash_N[:-width] + np.uint64(power) * hash_N[width:]
        power = power * power % 2**64
    hash_N = (hash_N ^ (hash_N >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    hash_N ^= hash_N >> np.uint64(32)
    sketch_B = np.full(_BINS, _EMPTY)
    np.minimum.at(sketch_B, (hash_N >> np.uint64(58)).astype(np.int64), hash_N)
    return sketch_B


def similarity(a_B: np.ndarray, b_B: np.ndarray) -> float:
    """Estimated Jaccard similarity of the shingles of two texts."""
    used = (a_B != _EMPTY) | (b_B != _EMPTY)
    return float(((a_B == b_B) & used).sum() / used.sum())


class NearDuplicates:
    """Texts that were kept, by the bands of their sketches."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []
        self._bands: dict[tuple[int, bytes], list[int]] = {}

    def keep(self, text: str) -> bool:
        """Add a text unless it resembles one that was kept; return whether it was added."""
        sketch_B = sketch(text)
        bands = [
            (i, sketch_B[i : i + _ROWS].tobytes())
            for i in range(0, _BINS, _ROWS)
            if (sketch_B[i : i + _ROWS] != _EMPTY).any()
        ]
        candidates = {i for band in bands for i in self._bands.get(band, ())}
        if any(similarity(sketch_B, self._kept[i]) >= SIMILAR for i in candidates):
            return False
        for band in bands:
            self._bands.setdefault(band, []).append(len(self._kept))
        self._kept.append(sketch_B)
        return True
