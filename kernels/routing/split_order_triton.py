"""`kernels.routing.split_order` in one launch of one program, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def split_order_kernel(order, to, P, own, PLACES: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, PLACES)
    place = tl.load(order + i, mask=i < P, other=PLACES)
    first = (place < own).to(tl.int32)
    behind = 1 - first
    at_first = tl.cumsum(first, 0) - 1
    at_behind = own + tl.cumsum(behind, 0) - 1  # what is past the end comes last
    at = tl.where(first > 0, at_first, at_behind)
    tl.store(to + at, place - own * behind, mask=i < P)


def split_order_in_triton(order_P: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """As `split_order`."""
    P, made_P = len(order_P), torch.empty_like(order_P)
    if P:
        places = triton.next_power_of_2(P)
        split_order_kernel[(1,)](order_P, made_P, P, own, PLACES=places, num_warps=1)
    return made_P[:own], made_P[own:]
