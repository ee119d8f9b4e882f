"""The order in which the fused scheduler takes experts, of own experts and of replicas apart.

Legend: P places of a rank, of which L are own experts' and the ones behind them replicas'.
"""

import torch
from torch import Tensor


def split_order(order_P: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """The order of the first `own` places, and that of the places behind them, counted from these.

    One launch of Triton on CUDA, with the bits of `split_order_by_sort`.

    Args:
        order_P: int32, each place once.
        own: L, at most P.
    """
    if not order_P.is_cuda:
        return split_order_by_sort(order_P, own)
    from phalanx.kernels.routing.split_order_triton import split_order_in_triton

    return split_order_in_triton(order_P, own)


def split_order_by_sort(order_P: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """The definition of `split_order`."""
    behind = (order_P >= own).to(torch.uint8)
    apart_P = order_P.index_select(0, behind.sort(stable=True).indices)
    return apart_P[:own], apart_P[own:] - own
