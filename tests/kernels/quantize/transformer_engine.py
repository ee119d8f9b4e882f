"""Transformer Engine's rule for FP8 in blocks, in numpy and fp64 tables, apart from ours.

Of version 2.20, common/recipe/recipe_common.cuh and quantize_transpose_vector_blockwise.cu: the
scale is the format's largest number divided by amax in fp32, the largest finite number of the input
where that overflows, its mantissa cleared; 1 for an amax of 0. Elements are multiplied in fp32 and
rounded to the nearest number of the format, to the even one of two; larger ones become the largest.
For an infinity ours is NaN, what multiplies the elements 1 as there.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
LAST = {torch.float8_e4m3fn: 126, torch.float8_e5m2: 123}
"""Code of the largest number."""


class Expected(NamedTuple):
    """codes uint8 [R, C], NaN as 0x7F; scale fp32, [row blocks, parts * column blocks]."""

    codes: np.ndarray
    scale: np.ndarray


def numbers(dtype: torch.dtype) -> np.ndarray:
    """fp64: the numbers of a format from 0 on; the index is the code."""
    bits = MANTISSA[dtype]
    code = np.arange(LAST[dtype] + 1)
    exponent, mantissa = code >> bits, code % (1 << bits)
    bias = (1 << (6 - bits)) - 1
    normal = exponent > 0
    return (normal + mantissa / (1 << bits)) * 2.0 ** (np.where(normal, exponent, 1) - bias)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Codes of fp32 numbers."""
    values = numbers(dtype)
    middle = (values[1:] + values[:-1]) / 2
    size = np.abs(x.astype(np.float64))
    code = np.searchsorted(middle, size)
    at = np.minimum(code, len(middle) - 1)
    code = code + ((size == middle[at]) & (code == at) & (code % 2 == 1))
    code = np.where(np.isnan(x), 0x7F, code | np.signbit(x) << 7)
    return code.astype(np.uint8)


def multiplier(amax: np.ndarray, dtype: torch.dtype, largest: float) -> np.ndarray:
    """Factor on elements; `largest` is the input's largest finite number."""
    top = np.float32(numbers(dtype)[-1])
    with np.errstate(all="ignore"):
        s = top / amax
    assert s.dtype == np.float32
    s = np.where(np.isinf(s), np.float32(largest), s)
    s = (s.view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    usual = (amax > 0) & np.isfinite(amax)
    return np.where(usual, s, np.float32(1))


def _block(x: np.ndarray, dtype: torch.dtype, largest: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of blocks [N, elements]."""
    amax = np.fmax.reduce(np.abs(x), axis=1, initial=np.float32(0))
    s = multiplier(amax, dtype, largest)
    with np.errstate(all="ignore"):
        codes = rounded(x * s[:, None], dtype)
        inverse = np.float32(1) / s
    return codes, np.where(np.isinf(amax), np.float32(np.nan), inverse)


def expected(x_RC: Tensor, tile: tuple[int, int], dtype: torch.dtype, parts: int = 1) -> Expected:
    """Quantize a matrix in tiles of rows by channels within each part of the channels."""
    R, C = x_RC.shape
    x, width, down = x_RC.float().numpy(), C // parts, -(-R // tile[0])
    codes = np.zeros((down * tile[0], C), np.uint8)
    scales = []
    for part in range(parts):
        for first in range(0, width, tile[1]):
            span = slice(part * width + first, part * width + min(first + tile[1], width))
            piece = np.zeros((down * tile[0], span.stop - span.start), np.float32)
            piece[:R] = x[:, span]
            made, scale = _block(
                piece.reshape(down, piece.shape[1] * tile[0]), dtype, torch.finfo(x_RC.dtype).max
            )
            codes[:, span] = made.reshape(piece.shape)
            scales.append(scale)
    return Expected(codes[:R], np.stack(scales, 1) if scales else np.zeros((down, 0), np.float32))
