"""Copies of tensors with rows of another size, or times a factor: Triton on NVIDIA GPUs.

torch's own reach a third of the speed of memory where rows are no multiple of 16 bytes, or where
dtypes differ.

Legend: S rows, D channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_rows(rows_SD: Tensor, channels: int) -> Tensor:
    """A copy [S, channels] of contiguous rows: cut, or with zeros behind them; differentiable."""
    if rows_SD.is_cuda and not (torch.is_grad_enabled() and rows_SD.requires_grad):
        from phalanx.kernels.functional.copies_triton import resize

        return resize(rows_SD, channels)
    return F.pad(rows_SD, (0, channels - rows_SD.shape[1]))


@torch.no_grad()
def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a scalar, fp32 or fp64 [], in a dtype, in one pass, with one rounding."""
    out = torch.empty_like(x, dtype=dtype)
    if x.is_cuda and x.dtype != torch.float64 and x.is_contiguous():
        from phalanx.kernels.functional.copies_triton import scale

        scale(x, factor, out)
        return out
    # With two axes it counts in the dtype of the product: a scalar would be rounded to that of x.
    return torch.mul(x, factor.view(1, 1), out=out)
