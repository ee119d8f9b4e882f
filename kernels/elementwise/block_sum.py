"""The sum of blocks in order: results of several ranks for the same tokens.

torch.sum guarantees no order, and on a GPU keeps four partial sums: with eight blocks its bits are
not those of a sum in order. The order is fixed here so that bits agree between transports and
numbers of ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def block_sum(blocks: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
    """blocks[0] + blocks[1] + ..., in that order in fp32, and rounded once.

    Args:
        blocks: [R, ...], R >= 1, bf16 or fp32, contiguous.
        addends: up to two [...] in the dtype of the blocks, which follow them. On a GPU they are
            added before the sum is rounded, on a CPU one after the other in their dtype.

    Returns:
        [...] in the dtype of the blocks.
    """
    if blocks.is_cuda:
        from phalanx.kernels.elementwise.block_sum_triton import add_up

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
