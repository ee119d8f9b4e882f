"""Quantised weights back to bf16: MXFP4 of GPT-OSS and block-scaled FP8 of DeepSeek-V3.

Products are exact in fp32 and rounded to bf16 once. MXFP4 follows the OCP Microscaling Formats
specification 1.0: 32 E2M1 values share one E8M0 scale, of which 255 is NaN.
"""

import math

import torch
from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
_SCALES = torch.tensor([*(math.ldexp(1.0, code - 127) for code in range(255)), math.nan])


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Values of MXFP4 blocks.

    Args:
        blocks: uint8 [..., N, 16], two values a byte, the first in the low four bits.
        scales: uint8 [..., N], the exponent of each block plus 127.

    Returns:
        bf16 [..., 32 * N].
    """
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    values = _VALUES[codes.int()] * _SCALES[scales.int()][..., None]
    return values.flatten(-2).to(torch.bfloat16)


def from_fp8(weight: Tensor, scale: Tensor, block: tuple[int, int], first_row: int = 0) -> Tensor:
    """Values of a matrix, or of some of its rows, with a scale per block.

    Args:
        weight: float8_e4m3fn [R, C].
        scale: of the full matrix, [rows / block[0], C / block[1]] rounded up; any float dtype.
        block: rows and columns that share a scale.
        first_row: row of the full matrix at which `weight` starts.

    Returns:
        bf16 [R, C].
    """
    rows = torch.arange(first_row, first_row + weight.size(0)) // block[0]
    columns = torch.arange(weight.size(1)) // block[1]
    return (weight.float() * scale.float()[rows][:, columns]).to(torch.bfloat16)
