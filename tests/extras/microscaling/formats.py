"""Transformer Engine's rules for MXFP8 and NVFP4, in numpy and tables of numbers, apart from ours.

Of version 2.20: common/cast/mxfp8/quantize_mxfp8.cuh with float_to_e8m0 of common/util/ptx.cuh, and
pytorch/custom_recipes/reference_nvfp4.py with its default of scales that are not powers of two.
Numbers are rounded by a search in a table of all numbers of the format. Where the rule divides and
multiplies in fp32, numpy does so; powers of two are exact, and taken in fp64.

Of -0 NVFP4 keeps the sign, as Transformer Engine's kernels and not as its Python reference do.
"""

from typing import NamedTuple

import numpy as np
import torch

from tests.kernels.quantize.transformer_engine import numbers

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
E4M3 = numbers(torch.float8_e4m3fn)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
F = np.float32


class Expected(NamedTuple):
    codes: np.ndarray
    """uint8, as the matrix."""
    scale: np.ndarray
    """uint8, of blocks along the last dimension: bits of e8m0 or of e4m3."""


def nearest(size: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of numbers without a sign: the nearest, the even one of two, the last of larger."""
    size = size.astype(np.float64)
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = size - table[above - 1], table[above] - size
    up = (high < low) | ((high == low) & (above % 2 == 0))
    return np.where(up, above, above - 1)


def with_sign(code: np.ndarray, x: np.ndarray, bits: int, nan: int) -> np.ndarray:
    signed = code | np.signbit(x).astype(np.int64) << (bits - 1)
    return np.where(np.isnan(x), nan, signed).astype(np.uint8)


def e8m0(value: np.ndarray) -> np.ndarray:
    """e8m0 of non-negative fp32, by trying all powers of two."""
    table = 2.0 ** np.arange(-127, 128)
    code = np.searchsorted(table, value.astype(np.float64))
    return np.where(np.isnan(value), 0xFF, np.minimum(code, 0xFE)).astype(np.uint8)


def blocks_of(x: np.ndarray, block: int) -> list[slice]:
    return [slice(i, min(i + block, x.shape[-1])) for i in range(0, x.shape[-1], block)]


def mxfp8(x: np.ndarray, parts: int = 1) -> Expected:
    """MXFP8 of fp32 [R, C] in blocks of 32 within each of the parts."""
    codes, scales = [], []
    for part in np.split(x, parts, 1):
        for span in blocks_of(part, 32):
            piece = part[:, span]
            amax = np.fmax.reduce(np.abs(piece), axis=1, initial=F(0))
            with np.errstate(all="ignore"):
                scale = e8m0(amax * (F(1) / F(448)))
            exact = piece.astype(np.float64) / 2.0 ** (scale.astype(float) - 127)[:, None]
            codes.append(with_sign(nearest(np.abs(exact), E4M3), piece, 8, 0x7F))
            scales.append(scale)
    return Expected(np.concatenate(codes, 1), np.stack(scales, 1))


def nvfp4(
    x: np.ndarray,
    amax: np.ndarray,
    parts: int = 1,
    square: bool = False,
    random: np.ndarray | None = None,
) -> Expected:
    """NVFP4 of fp32 [R, C] in blocks of 16, or of 16 x 16 with the scale of each of their rows.

    `amax` is that of the tensor of each row, fp32 [R]. With `random`, fp64 [R, C] in [0, 1), an
    element goes up if it is further from the number below than that part of the gap.
    """
    codes, scales = [], []
    with np.errstate(all="ignore"):
        S = np.minimum(F(448) * F(6) / amax, np.finfo(F).max)
        S = np.where(S == 0, F(1), S)  # of infinity
        S = np.where(amax == 0, F(1), S)
        for p, part in enumerate(np.split(x, parts, 1)):
            for span in blocks_of(part, 16):
                piece = part[:, span]
                largest = np.max(np.abs(piece), axis=1)
                if square:
                    heights = range(0, len(x), 16)
                    largest = np.concatenate(
                        [
                            np.full(len(largest[i : i + 16]), largest[i : i + 16].max())
                            for i in heights
                        ]
                    )
                wanted = np.minimum(largest * (S * (F(1) / F(6))), F(448))
                scale = np.where(np.isnan(wanted), 0x7F, nearest(wanted, E4M3))
                values = np.append(E4M3, np.nan).astype(F)[np.minimum(scale, 127)]
                encode = np.minimum(F(1) / (values * (F(1) / S)), np.finfo(F).max)
                y = np.clip(piece * encode[:, None], F(-6), F(6))
                assert y.dtype == F
                if random is None:
                    code = nearest(np.abs(y), E2M1)
                else:
                    width = part.shape[1]
                    drawn = random[:, p * width + span.start : p * width + span.stop]
                    size = np.abs(y).astype(np.float64)
                    low = np.searchsorted(E2M1, np.nan_to_num(size), side="right") - 1
                    gap = np.append(np.diff(E2M1), 1.0)[low]
                    code = low + (size - E2M1[low] > drawn * gap)
                codes.append(with_sign(code, y, 4, 0))
                scales.append(scale.astype(np.uint8))
    return Expected(np.concatenate(codes, 1), np.stack(scales, 1))


def rotation() -> np.ndarray:
    """fp64 [16, 16]: what 16 tokens are multiplied with from the left."""
    hadamard = [[(-1) ** bin(i & j).count("1") for j in range(16)] for i in range(16)]
    return np.array(hadamard) @ np.diag(SIGNS) / 4


def uniform(key: int, element: int) -> float:
    """One draw, in Python's integers."""
    h = (element * 0x9E3779B1 + key) % 2**32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * factor % 2**32
    return ((h ^ h >> 16) >> 8) / 2**24


def key(x: np.ndarray) -> int:
    """Key of fp32 [R, C], the rows of one expert."""
    total = 0
    for element, bits in enumerate(x.reshape(-1).view(np.uint32).tolist()):
        total += (bits ^ bits >> 16) * (element * 0x9E3779B1 % 2**32 | 1)
    return total % 2**32
