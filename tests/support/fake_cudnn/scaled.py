"""Operands with scales of blocks: read from, and written to, the layouts of the tensor cores.

Stated element by element, apart from `extras.blackwell.operands`: the scale of row r and block b
lies at ((r / 128) * ceil(B / 4) + b / 4) * 512 + (r % 32) * 16 + (r % 128 / 32) * 4 + b % 4.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.fake_cudnn.checks import BF16, operand

FP8, FP4 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
_E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class Family(NamedTuple):
    """A format of operands."""

    data: torch.dtype
    scale: torch.dtype | None
    block: int
    wide: int
    """Elements of a unit of the data."""


FAMILIES = {
    BF16: Family(BF16, None, 16, 1),
    FP8: Family(FP8, torch.float8_e8m0fnu, 32, 1),
    FP4: Family(FP4, torch.float8_e4m3fn, 16, 2),
}


def family(a: Tensor, sf_vec_size: int) -> Family:
    assert a.dtype in FAMILIES, a.dtype
    found = FAMILIES[a.dtype]
    assert sf_vec_size == found.block, f"blocks of {sf_vec_size} for {a.dtype}"
    return found


def places(rows: int, blocks: int) -> Tensor:
    """int64 [rows, blocks]: byte offset of each scale."""
    r, b = torch.arange(rows)[:, None], torch.arange(blocks)[None]
    atom = r // 128 * -(-blocks // 4) + b // 4
    return atom * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4


def size(rows: int, blocks: int) -> int:
    """Bytes of a matrix's scales, with padding."""
    return 512 * -(-rows // 128) * -(-blocks // 4)


def read(name: str, data: Tensor, scale: Tensor | None, shape: tuple[int, ...], own: Family):
    """fp32 matrices [..., R, C] that are contracted over C; without scales unchanged."""
    *batch, R, C = shape
    operand(name, data, own.data, (*batch, R, C // own.wide))
    if own.scale is None:
        assert scale is None
        return data.float()
    assert C % (16 if own.data == FP8 else 32) == 0, "rows of whole 16 bytes"
    groups, B = math.prod(batch), -(-C // own.block)
    assert isinstance(scale, Tensor) and scale.dtype == own.scale, f"scales of {name}"
    assert scale.is_contiguous() and scale.numel() == size(R, B) * groups, f"scales of {name}"
    assert scale.data_ptr() % 16 == 0, f"scales of {name}"
    of_blocks = number(scale.view(groups, -1)[:, places(R, B)])
    wide = of_blocks.repeat_interleave(own.block, -1)[..., :C]
    return (elements(data).view(groups, R, C) * wide).view(shape)


def read_columns(
    name: str, data: Tensor, scale: Tensor, offsets: Tensor, rows: int, own: Family
) -> Tensor:
    """fp32 [rows, T] of a weight gradient's operand, whose experts' scales follow one another."""
    T = data.shape[1] * (own.wide if data.stride(1) == 1 else 1)
    values = elements(data)
    assert scale.dtype == own.scale and scale.ndim == 1 and scale.is_contiguous()
    assert scale.numel() == size(rows, -(-T // own.block)), f"scales of {name}"
    out, begin = torch.full((rows, T), math.nan), 0
    for end in offsets.tolist():
        count = (end - begin) // own.block
        base = -(-rows // 128) * 128 * begin // own.block
        of_blocks = number(scale[base + places(rows, count)])
        wide = of_blocks.repeat_interleave(own.block, 1)
        out[:, begin:end] = values[:, begin:end] * wide
        begin = end
    return out


def elements(data: Tensor) -> Tensor:
    """fp32; two of a byte, the first in its low half."""
    if data.dtype != FP4:
        return data.float()
    codes = data.view(torch.uint8)
    return _E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]


def number(scale: Tensor) -> Tensor:
    if scale.dtype == torch.float8_e8m0fnu:
        return torch.exp2(scale.view(torch.uint8).float() - 127)
    return scale.float()


class Quantized(NamedTuple):
    """Output of an epilogue for fp32 [S, C]."""

    row: Tensor
    col: Tensor
    sfd_row: Tensor
    sfd_col: Tensor


def quantized(x_SC: Tensor, offsets: Tensor) -> Quantized:
    """e4m3 with scales of 32 channels of a row, and of 32 rows of a channel expert by expert.

    Rows from the last offset on are not written.
    """
    S, C = x_SC.shape
    end = int(offsets[-1])
    row, col = (torch.full((S, C), math.nan).to(FP8) for _ in range(2))
    shapes = (1, -(-S // 128), -(-(C // 32) // 4), 32, 4, 4), (1, -(-C // 128), S // 128, 32, 4, 4)
    sf_row, sf_col = (torch.full((math.prod(s),), 255, dtype=torch.uint8) for s in shapes)
    data, code = _blocks(x_SC[:end])
    row[:end] = data
    sf_row[places(S, C // 32)[:end]] = code
    begin = 0
    for stop in offsets.tolist():
        if stop > begin:
            data, code = _blocks(x_SC[begin:stop].T.contiguous())
            col[begin:stop] = data.T
            base = -(-C // 128) * 128 * begin // 32
            sf_col[base + places(C, (stop - begin) // 32)] = code
        begin = stop
    e8m0 = torch.float8_e8m0fnu
    return Quantized(
        row, col, *(t.view(e8m0).view(s) for t, s in zip((sf_row, sf_col), shapes, strict=True))
    )


def _blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise along the last dimension: e4m3, and e8m0 of amax / 448 rounded up."""
    amax = x.unflatten(-1, (-1, 32)).abs().amax(-1) * (1 / 448)
    mantissa, exponent = torch.frexp(amax)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-127, 127)
    exponent = torch.where(amax == 0, -127, exponent)
    scaled = x * torch.exp2(-exponent.float()).repeat_interleave(32, -1)
    return scaled.clamp(-448, 448).to(FP8), (exponent + 127).to(torch.uint8)
