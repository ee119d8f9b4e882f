"""Bounds of documents in a packed sequence, for attention within documents.

A sequence holds pieces of documents one after another. A query sees only keys of its own piece:
those of the causal mask and the window that start at `first_T`. Tensors are on the device and their
sizes do not depend on the documents, so that a CUDA graph can be replayed with others and the host
reads nothing: boundaries for variable-length kernels are padded to a fixed number with empty
documents at the end. Under context parallelism a rank has some tokens of a sequence, and attends to
all keys up to the last of them.

Legend: T tokens, N maximum number of documents.
"""

from typing import Any

import torch
from torch import Tensor


class Documents:
    """Pieces of documents in T tokens.

    Args:
        position_T: int64, of each token in its piece; 0 starts a piece, as the first token does.
        places: N, at least the number of pieces, for `bounds_N1`; 0: no bounds.
        longest: upper bound of a piece's tokens.
        before: keys before the first token, which need not start a piece then; not with `places`.
    """

    def __init__(self, position_T: Tensor, *, places: int, longest: int, before: int = 0) -> None:
        assert not (before and places)
        self.before = before
        index_T = torch.arange(before, before + position_T.numel(), device=position_T.device)
        self.first_T = (index_T - position_T).clamp(min=0)  # first key of each token's piece
        self.last_T = position_T.roll(-1) == 0  # bool: ends its piece
        self.longest = longest
        self.bounds_N1 = _bounds(position_T, index_T, places) if places else None
        """int32 [N + 1]: start of each piece, end of the last one, and T from there on."""
        self.masks: dict[Any, Any] = {}  # of a backend, by window


def _bounds(position_T: Tensor, index_T: Tensor, places: int) -> Tensor:
    T = position_T.numel()
    starts_T = torch.where(position_T == 0, index_T, T).sort().values
    bounds_N1 = starts_T.new_full((places + 1,), T)
    count = min(places, T)
    bounds_N1[:count] = starts_T[:count]
    return bounds_N1.int()
