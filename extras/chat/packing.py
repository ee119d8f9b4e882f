"""Whole rows packed into sequences of one length: best fit decreasing.

The longest rows come first, each into the sequence with the least room that it fits into. TRL and
others pack so too (Ding et al., 2024, https://arxiv.org/abs/2404.10830).
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence

import numpy as np


def packed(lengths: Sequence[int] | np.ndarray, size: int, seed: int = 0) -> list[list[int]]:
    """Numbers of the rows of each sequence, in an order drawn by the seed.

    Args:
        lengths: tokens of each row, at most `size`.
        size: tokens of a sequence.
        seed: of the order, so that the first and last sequences, as parts of a split, are alike.
    """
    sequences: list[list[int]] = []
    rooms: list[int] = []  # distinct numbers of free tokens, ascending
    having = defaultdict[int, list[int]](list)  # sequences by their number of free tokens
    for row in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        length = int(lengths[row])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, number = size, len(sequences)
            sequences.append([])
        else:
            room = rooms[at]
            number = having[room].pop()
            if not having[room]:
                del rooms[at]
        sequences[number].append(row)
        left = room - length
        if not having[left]:
            insort(rooms, left)
        having[left].append(number)
    order = np.random.default_rng(seed).permutation(len(sequences))
    return [sequences[i] for i in order]
