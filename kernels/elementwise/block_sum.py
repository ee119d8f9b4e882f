"""The sum of blocks in their order: what several ranks made of the same tokens.

torch.sum promises no order, and on a GPU takes four sums at a time: with eight blocks its bits are
not those of a sum in order. Where bits are compared, between transports or with another number of
ranks, the order has to be a given one.
"""

import torch
from torch import Tensor


@torch.no_grad()
def block_sum(blocks: Tensor) -> Tensor:
    """blocks[0] + blocks[1] + ..., in that order in fp32, and rounded once.

    Args:
        blocks: [R, ...], R >= 1, bf16 or fp32, contiguous.

    Returns:
        [...] in the dtype of the blocks.
    """
    if blocks.is_cuda:
        from phalanx.kernels.elementwise.block_sum_triton import add_up

        return add_up(blocks)
    total = blocks[0].float()
    for block in blocks[1:]:
        total = total + block
    return total.to(blocks.dtype)
