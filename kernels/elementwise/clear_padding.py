"""Zeros in the rows of a tensor that no expert has, which kernels leave unspecified.

A Triton kernel on a GPU, whose programs end at once where rows are in use; torch elsewhere.
"""

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.sort_pairs import used_rows


@torch.no_grad()
def clear_padding(rows_SD: Tensor, offsets: Tensor) -> None:
    """Set rows from offsets[-1] on to 0.

    Args:
        rows_SD: contiguous, of any dtype.
        offsets: int32 [L + 1], first row of each expert.
    """
    if rows_SD.is_cuda:
        from phalanx.kernels.elementwise.clear_padding_triton import clear

        clear(rows_SD, offsets)
        return
    rows_SD.masked_fill_(~used_rows(rows_SD, offsets)[:, None], 0)
