"""Random bits of stochastic rounding, as a function of the values that are rounded.

A tensor's key is a checksum of its bits, and the bits of an element a hash of key and index. There
is no generator and no state: the same tensor is rounded the same way in a resumed run, in the
replay of a CUDA graph, on a CPU and on a GPU; another tensor, of another step, layer or
micro-batch, in another way. All is in 32-bit integers, whose sums do not depend on order.

Legend: S expert rows, C channels, L experts.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B1
MURMUR = (0x85EBCA6B, 0xC2B2AE35)
"""Odd multipliers: 2^32 over the golden ratio, and those of MurmurHash3's finalizer."""


def keys(x_SC: Tensor, group_S: Tensor, element_SC: Tensor, groups: int) -> Tensor:
    """int32 [groups]: checksums of the rows of each group.

    Args:
        x_SC: fp32.
        group_S: int64 group of each row; rows with `groups` or more belong to none.
        element_SC: int32 indices of `elements`.
    """
    bits = x_SC.contiguous().view(torch.int32)
    bits = bits ^ _shifted(bits, 16)  # bf16 has nothing in the low half
    sums_S = (bits * (_wrapped(element_SC, GOLDEN) | 1)).sum(1, dtype=torch.int64)
    total = torch.zeros(groups + 1, dtype=torch.int64, device=x_SC.device)
    return low(total.index_add_(0, group_S.clamp(max=groups), sums_S)[:groups])


def elements(row_S: Tensor, channels: int) -> Tensor:
    """int32 [S, C]: index of each element in its expert's tensor, from its row there."""
    channel_C = torch.arange(channels, dtype=torch.int64, device=row_S.device)
    return low(row_S.long()[:, None] * channels + channel_C)


def uniform(key: Tensor, element: Tensor) -> Tensor:
    """fp32 multiples of 2^-24 in [0, 1); key and element are int32 and broadcast."""
    h = _wrapped(element, GOLDEN) + key
    for shift, factor in zip((16, 13), MURMUR, strict=True):
        h = _wrapped(h ^ _shifted(h, shift), factor)
    return _shifted(h ^ _shifted(h, 16), 8).float() * 2**-24


def _wrapped(x: Tensor, factor: int) -> Tensor:
    """x * factor modulo 2^32."""
    return x * (factor - (1 << 32))


def _shifted(x: Tensor, by: int) -> Tensor:
    """x >> by with zeros shifted in, as for unsigned integers."""
    return (x >> by) & ((1 << (32 - by)) - 1)


def low(x: Tensor) -> Tensor:
    """int64 -> int32 of the lower half."""
    half = x & 0xFFFFFFFF
    return torch.where(half < 1 << 31, half, half - (1 << 32)).int()
