"""Indices of a table in 32 bits."""

import torch
from torch import Tensor


def as_int32(index: Tensor, end: int) -> Tensor:
    """The same integers as int32, where those outside 0 to `end` - 1 stay outside.

    A cast alone would keep the lower 32 bits, so that 2^32 became 0. Nothing is read on the host.

    Args:
        index: integers of any dtype; the result may be this tensor.
        end: at most 2^31 - 1.
    """
    if index.dtype.itemsize > 4:
        index = index.long().clamp(-1, end)
    return index.to(torch.int32)
