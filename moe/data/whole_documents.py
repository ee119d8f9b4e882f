"""Presents documents of several sequences to Megatron-Core's datasets as one sequence each.

Its datasets split, shuffle and cut by sequence, and a sequence is a document only if the index was
written that way. The sequences of a document are contiguous in the .bin, so that a document is a
range of it, like a sequence.
"""

from typing import Any

import numpy as np


class WholeDocuments:
    """The index of an IndexedDataset, with document i in place of sequence i.

    Args:
        index: of the dataset.
        lengths: int32 [documents], tokens of each.
    """

    sequence_modes = None

    def __init__(self, index: Any, lengths: np.ndarray) -> None:
        self._index, self.sequence_lengths = index, lengths
        self.dtype = index.dtype

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, number: int) -> tuple[np.int64, np.int32, None]:
        """Byte offset, tokens, and no mode."""
        first, pointers = self._index.document_indices[number], self._index.sequence_pointers
        # Documents after the last sequence are empty.
        pointer = pointers[first] if first < len(pointers) else np.int64(0)
        return pointer, self.sequence_lengths[number], None
