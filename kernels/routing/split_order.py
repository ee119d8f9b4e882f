"""Order in which the fused scheduler takes experts, split into own experts and replicas.

Legend: P expert slots of a rank: L of own experts, then those of replicas.
"""

import torch
from torch import Tensor


def split_order(order_P: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Order of the first `own` slots, and of the slots behind them, numbered from 0.

    One Triton launch on CUDA, with the bits of `split_order_by_sort`.

    Args:
        order_P: int32, each slot once.
        own: L, at most P.
    """
    if not order_P.is_cuda:
        return split_order_by_sort(order_P, own)
    from phalanx.kernels.routing.split_order_triton import split_order_in_triton

    return split_order_in_triton(order_P, own)


def split_order_by_sort(order_P: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """The definition of `split_order`."""
    is_replica = (order_P >= own).to(torch.uint8)
    split_P = order_P.index_select(0, is_replica.sort(stable=True).indices)
    return split_P[:own], split_P[own:] - own
