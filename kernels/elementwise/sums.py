"""Sums over tensors in few reads, with results that depend on contents and shapes alone.

The sum of squares is for the norm of gradients, that of blocks for the results of several ranks for
the same tokens. torch.sum guarantees no order, and on a GPU keeps four partial sums: with eight
blocks its bits are not those of a sum in order. A fixed order makes bits agree between transports
and numbers of ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_LARGE = 1 << 20  # elements from which a tensor has a launch of its own on a GPU


@torch.no_grad()
def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements: fp64 scalar on the device of the tensors.

    Summed in fp64; the kernel of large tensors on a GPU first sums some thousands in fp32. Nothing
    is read on the host. There is at least one tensor; all are floating and on one device.
    """
    large: list[Tensor] = []
    small: list[Tensor] = []
    for t in tensors:
        (large if t.is_cuda and t.is_contiguous() and t.numel() >= _LARGE else small).append(t)
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    if small:
        norms = torch._foreach_norm(small, dtype=torch.float64)
        total += torch.stack(norms).square().sum()
    if large:
        from phalanx.kernels.elementwise.sums_triton import partial_sums

        total += partial_sums(large).sum(dtype=torch.float64)
    return total


@torch.no_grad()
def block_sum(blocks: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
    """blocks[0] + blocks[1] + ..., in that order in fp32, and rounded once.

    Args:
        blocks: [R, ...], R >= 1, bf16 or fp32, contiguous.
        addends: up to two [...] in the dtype of the blocks, which follow them. On a GPU they are
            added before the sum is rounded, on a CPU one after the other in their dtype.
    """
    if blocks.is_cuda:
        from phalanx.kernels.elementwise.sums_triton import add_up

        return add_up(blocks, addends)
    total = blocks[0].float()
    for block in blocks[1:]:
        total = total + block
    return plus(total.to(blocks.dtype), addends)


def plus(total: Tensor, addends: Sequence[Tensor]) -> Tensor:
    """A sum and addends, one after the other in their dtype."""
    for addend in addends:
        total = total + addend
    return total
