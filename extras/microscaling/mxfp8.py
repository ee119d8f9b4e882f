"""MXFP8: the definition in plain torch, on any device.

e4m3 in blocks of 32 elements along the contraction with scales that are powers of two in e8m0 (OCP
Microscaling Formats, v1.0), as Transformer Engine 2.20's MXFP8BlockScaling makes them
(common/cast/mxfp8/quantize_mxfp8.cuh): the exponent of amax / 448 rounded up. A tensor that is read
along another dimension too is quantized again from the original, never from quantized values.

A NaN stays one in its element and has no part in amax. An infinity becomes 448 with the scale
2^127, which is infinite again in fp32.

Legend: R rows, C channels, L experts, S expert rows, T rows of S with every expert's padded to full
blocks; B_X is X in blocks of BLOCK, the last of which may be short. `parts` are equal ranges of
channels, whose borders no block crosses.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.quantize.blocks import join_parts, padded, split_parts, spread, tile_amax

BLOCK = 32  # elements that share a scale

_TILE = (1, BLOCK)


class MXFP8(NamedTuple):
    """A matrix whose last dimension is contracted; its values are data * 2^(scale - 127)."""

    data: Tensor  # e4m3 [..., R, C]
    scale: Tensor  # uint8 [..., R, parts * B_C/parts]: the bits of e8m0


def quantize(x: Tensor, parts: int = 1) -> MXFP8:
    """Blocks along the last dimension; for a contraction of weights over O give the transpose."""
    x = split_parts(x.float(), parts)
    amax = tile_amax(x.abs().nan_to_num(nan=0.0, posinf=torch.inf), _TILE)
    scale = e8m0(amax * (1 / 448))
    data = (x * spread(_inverse(scale), x, _TILE)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return MXFP8(join_parts(data), join_parts(scale))


def dequantize(q: MXFP8, parts: int = 1) -> Tensor:
    """fp32, of the shape of the data."""
    data = split_parts(q.data, parts).float()
    return join_parts(data * spread(power(split_parts(q.scale, parts)), data, _TILE))


def quantize_columns(x_SC: Tensor, offsets: Tensor, align: int = BLOCK) -> MXFP8:
    """Expert rows for a contraction over an expert's tokens: data [C, T], scales [C, T / BLOCK].

    Args:
        x_SC: bf16 or fp32; rows from offsets[L] on are not read.
        offsets: int32 [L + 1], first row of each expert.
        align: multiple at which an expert's tokens start, and of BLOCK. Columns between experts are
            0.
    """
    return quantize(padded(x_SC, offsets, align).T)


def e8m0(value: Tensor) -> Tensor:
    """uint8: exponent of the least power of two that is at least fp32 `value` >= 0, plus 127.

    NaN is 0xFF, values above 2^127 are 0xFE, and 0 is 0, which stands for 2^-127.
    """
    bits = value.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # 2^-127 is half of the least normal number.
    above = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    code = (exponent + above.int()).clamp(max=0xFE)
    return torch.where(value.isnan(), 0xFF, code).to(torch.uint8)


def power(scale: Tensor) -> Tensor:
    """fp32 value of e8m0."""
    code = scale.int()
    bits = torch.where(code > 0, code << 23, 1 << 22)
    return torch.where(code == 0xFF, torch.nan, bits.to(torch.int32).view(torch.float32))


def _inverse(scale: Tensor) -> Tensor:
    """1 / power; exact for the scale 0 too, which only zeros and denormal numbers have."""
    return power(torch.where(scale == 0xFF, scale.int(), 254 - scale.int()))
