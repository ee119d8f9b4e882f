"""`kernels.routing.split_order` in one launch of one program, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def split_order_kernel(order, out, P, own, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, SLOTS)
    slot = tl.load(order + i, mask=i < P, other=SLOTS)
    is_own = (slot < own).to(tl.int32)
    is_replica = 1 - is_own
    own_index = tl.cumsum(is_own, 0) - 1
    replica_index = own + tl.cumsum(is_replica, 0) - 1  # masked lanes come last
    index = tl.where(is_own > 0, own_index, replica_index)
    tl.store(out + index, slot - own * is_replica, mask=i < P)


def split_order_in_triton(order_P: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """`kernels.routing.split_order.split_order` on CUDA."""
    P, split_P = len(order_P), torch.empty_like(order_P)
    if P:
        slots = triton.next_power_of_2(P)
        split_order_kernel[(1,)](order_P, split_P, P, own, SLOTS=slots, num_warps=1)
    return split_P[:own], split_P[own:]
