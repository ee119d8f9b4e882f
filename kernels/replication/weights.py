"""Weights of cloned experts on their way to guest slots, and gradients on their way back.

The definitions, in terms of the memory of all ranks; `kernels.replication.weights_triton` does the same
with addresses. Which experts are where is known on the device alone, so that both look at all
slots, whoever holds them.

Legend: R ranks, L own experts of a rank, G guest slots of a rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def send_weights(own_L: Tensor, expert_RG: Tensor, guests_RG: Sequence[Tensor], rank: int) -> None:
    """Copy this rank's experts to the slots that hold them.

    Args:
        own_L: one weight of the own experts, [L, ...].
        expert_RG: int32 expert in each slot, -1 for none.
        guests_RG: memory [G, ...] of each rank.
        rank: this one.
    """
    for expert_G, guests_G in zip(expert_RG, guests_RG, strict=True):
        at_G = expert_G - rank * len(own_L)
        lent_G = (expert_G >= 0) & (at_G >= 0) & (at_G < len(own_L))
        copies_G = own_L.index_select(0, torch.where(lent_G, at_G, 0))
        guests_G.copy_(torch.where(_wide(lent_G, own_L), copies_G, guests_G))


def reduce_grads(own_L: Tensor, expert_RG: Tensor, room_RG: Sequence[Tensor], rank: int) -> None:
    """Add gradients of guests to those of this rank's experts, in the order of ranks, in fp32 and
    rounded once for each.

    Args:
        own_L: gradients of one weight of the own experts, [L, ...], fp32 or narrower; in place.
        expert_RG: int32 expert in each slot, -1 for none.
        room_RG: fp32 memory [G, ...] of each rank.
        rank: this one.
    """
    for expert_G, grads_G in zip(expert_RG, room_RG, strict=True):
        for expert, grad in zip(expert_G, grads_G, strict=True):
            at_1 = (expert - rank * len(own_L)).view(1)
            lent_1 = (expert >= 0) & (at_1 >= 0) & (at_1 < len(own_L))
            at_1 = torch.where(lent_1, at_1, 0).long()
            own_1 = own_L.index_select(0, at_1)
            sum_1 = (own_1.float() + grad).to(own_L.dtype)
            own_L.index_copy_(0, at_1, torch.where(_wide(lent_1, own_L), sum_1, own_1))


def _wide(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of the first dimension of tensors as `like`."""
    return mask.view(-1, *[1] * (like.ndim - 1))
