"""Numbers, shapes and routings at which a rule for FP8 in blocks can go wrong."""

import math

import torch
from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
INF, NAN = math.inf, math.nan
COUNTS = {
    "edges": [0, 1, 127, 0, 128, 129, 0],
    "one has all": [0, 0, 300, 0],
    "one expert": [130],
    "ones": [1, 1, 1, 1],
    "nobody": [0, 0, 0],
}
"""Rows of each expert."""
WIDTHS = {
    "1": (1, 1),
    "127": (127, 1),
    "128": (128, 1),
    "129": (129, 1),
    "2880 in two": (2880, 2),
    "2944": (2944, 1),
    "96 in two": (96, 2),
}
"""Channels and parts."""


def patterns() -> Tensor:
    """bf16 [65280]: every finite bit pattern, denormals and both zeros too."""
    bits = torch.arange(1 << 15, dtype=torch.int32)
    bits = bits[bits < 0x7F80]
    return torch.cat([bits, bits - (1 << 15)]).to(torch.int16).view(BF16)


def boundaries(dtype: torch.dtype) -> Tensor:
    """Each 1.75 * 2^k, at which the scale changes, each 2^k, and the numbers beside them."""
    wide, one = (torch.int16, 7) if dtype == BF16 else (torch.int32, 23)
    exponent = torch.arange(0, 255, dtype=torch.int64)
    starts = torch.cat([exponent << one, (exponent << one) + (3 << one - 2)])
    denormal = torch.arange(0, one)
    starts = torch.cat([starts, 1 << denormal, 7 << denormal[:-2]])
    bits = torch.cat([starts - 1, starts, starts + 1])
    last = (255 << one) - 1
    return bits.clamp(0, last).to(wide).view(dtype)


def below(amax: float) -> Tensor:
    """bf16 [N, 128]: rows that begin with amax and have every bit pattern up to that size."""
    every = patterns()
    every = every[every.abs() <= amax]
    every = torch.cat([every, every.new_zeros(-len(every) % 127)]).view(-1, 127)
    return torch.cat([torch.full((len(every), 1), amax, dtype=BF16), every], 1)


def special() -> Tensor:
    """bf16 [7, 128]: zeros of both signs, NaN and Inf, alone and with others."""
    x = torch.linspace(-3, 3, 7 * 128).view(7, 128)
    x[0] = 0.0
    x[1] = -0.0
    x[2, 5] = NAN
    x[3, 77] = -INF
    x[4, 3], x[4, 4] = NAN, INF
    x[5] = NAN
    x[6, 1:] = 0.0
    x[6, 0] = NAN
    return x.to(BF16)


def spread(rows: int, channels: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    """Random, with rows, and runs of channels, of very different sizes."""
    g = torch.Generator().manual_seed(seed + 1000 * rows + channels)
    x = torch.randn(rows, channels, generator=g)
    x = x * torch.exp2(torch.randint(-12, 12, (rows, 1), generator=g))
    x = (
        x
        * torch.exp2(torch.randint(-6, 6, (1, -(-channels // 64)), generator=g)).repeat_interleave(
            64, 1
        )[:, :channels]
    )
    return x.to(dtype)


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).to(torch.int32)


def expert_rows(counts: list[int], channels: int, padding: int = 5, seed: int = 0) -> Tensor:
    """bf16 rows of all experts, and rows of NaN after them."""
    x = spread(sum(counts) + padding, channels, seed=seed)
    x[sum(counts) :] = NAN
    return x
