"""Weights of replicated experts, sent to replica slots, and their gradients, sent back.

The definitions, in terms of the memory [G, ...] of all ranks;
`extras.replication.kernels.weights_triton` does the same with addresses. Only the device knows the
experts of slots, int32 `expert_RG`, -1 for none, so both look at all slots, whichever experts they
hold.

Legend: R ranks, L own experts of a rank, G replica slots of a rank.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def send_weights(own_L: Tensor, expert_RG: Tensor, slots_RG: Sequence[Tensor], rank: int) -> None:
    """Copy one weight of this rank's experts, [L, ...], to the slots of their replicas."""
    for expert_G, slots_G in zip(expert_RG, slots_RG, strict=True):
        index_G = expert_G - rank * len(own_L)
        sent_G = (expert_G >= 0) & (index_G >= 0) & (index_G < len(own_L))
        copies_G = own_L.index_select(0, torch.where(sent_G, index_G, 0))
        slots_G.copy_(torch.where(_broadcast(sent_G, own_L), copies_G, slots_G))


def reduce_grads(own_L: Tensor, expert_RG: Tensor, grads_RG: Sequence[Tensor], rank: int) -> None:
    """Add replicas' gradients, in the order of ranks, in fp32, with one rounding for each."""
    for expert_G, grads_G in zip(expert_RG, grads_RG, strict=True):
        for expert, grad in zip(expert_G, grads_G, strict=True):
            index_1 = (expert - rank * len(own_L)).view(1)
            owned_1 = (expert >= 0) & (index_1 >= 0) & (index_1 < len(own_L))
            index_1 = torch.where(owned_1, index_1, 0).long()
            own_1 = own_L.index_select(0, index_1)
            sum_1 = (own_1.float() + grad).to(own_L.dtype)
            own_L.index_copy_(0, index_1, torch.where(_broadcast(owned_1, own_L), sum_1, own_1))


def _broadcast(mask: Tensor, like: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (like.ndim - 1))
