"""`quantize_rows` and `dequantize_rows` on an NVIDIA GPU, in Triton: as fast as memory.

Blocks of all rows are numbered consecutively, and a program has a range of them: its accesses have
the same length for any number of channels, and no thread is idle.

Legend: R rows, C channels, B blocks of a row.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.quantize.blocks import BLOCK, Quantized
from phalanx.kernels.quantize.tiles_triton import BIASED, powers

_BLOCKS = 64  # blocks per program
_WARPS = 8


@triton.jit
def locate(  # type: ignore[no-untyped-def]
    number,
    blocks,
    width,
    of_part,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row, index in the row, first channel and mask of elements, of blocks by their numbers.

    A part has `of_part` blocks.
    """
    row = (number // (PARTS * of_part)).to(tl.int64)
    of_row = number % (PARTS * of_part)
    in_part = of_row % of_part * BLOCK
    here = (number < blocks)[:, None]
    if not WHOLE:
        here = here & (in_part[:, None] + tl.arange(0, BLOCK)[None, :] < width)
    return row, of_row, of_row // of_part * width + in_part, here


@triton.jit
def fp8_rows(  # type: ignore[no-untyped-def]
    x,
    data,
    scale,
    blocks,
    width,
    x_row,
    data_row,
    scale_row,
    scale_block,
    PARTS: tl.constexpr,
    OF_PART: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row, of_row, channel, here = locate(number, blocks, width, OF_PART, PARTS, WHOLE, BLOCK)
    i = tl.arange(0, BLOCK)[None, :]
    at = (row * x_row + channel)[:, None] + i
    values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    up, down = powers(tl.max(tl.abs(values), 1), BIASED)
    to = (row * data_row + channel)[:, None] + i
    tl.store(data + to, (values * up[:, None]).to(data.dtype.element_ty), mask=here)
    tl.store(scale + row * scale_row + of_row * scale_block, down, mask=number < blocks)


@triton.jit
def dequantize_fp8_rows(  # type: ignore[no-untyped-def]
    x,
    data,
    scale,
    blocks,
    width,
    x_row,
    data_row,
    scale_row,
    scale_block,
    PARTS: tl.constexpr,
    OF_PART: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row, of_row, channel, here = locate(number, blocks, width, OF_PART, PARTS, WHOLE, BLOCK)
    i = tl.arange(0, BLOCK)[None, :]
    at = scale + row * scale_row + of_row * scale_block
    scales = tl.load(at, mask=number < blocks, other=0.0)[:, None]
    at = data + ((row * data_row + channel)[:, None] + i)
    values = tl.load(at, mask=here, other=0.0).to(tl.float32) * scales
    to = x + ((row * x_row + channel)[:, None] + i)
    tl.store(to, values.to(x.dtype.element_ty), mask=here)


def quantize(x_RC: Tensor, to: Quantized, parts: int) -> None:
    """Write data and scales.

    Args:
        x_RC: bf16 or fp32, contiguous channels.
        to: data with contiguous channels, scales of any strides.
    """
    _launch(fp8_rows, x_RC, to, parts, BIASED=BIASED[to.data.dtype])


def dequantize(q: Quantized, to_RC: Tensor, parts: int) -> None:
    """Write values, bf16 or fp32; the strides are those of `quantize`."""
    _launch(dequantize_fp8_rows, to_RC, q, parts)


def _launch(kernel: Any, x_RC: Tensor, q: Quantized, parts: int, **constants: Any) -> None:
    R, width = x_RC.shape[0], x_RC.shape[1] // parts
    of_part = triton.cdiv(width, BLOCK)
    blocks = R * parts * of_part
    if not blocks:
        return
    kernel[(triton.cdiv(blocks, _BLOCKS),)](
        x_RC,
        *q,
        blocks,
        width,
        x_RC.stride(0),
        q.data.stride(0),
        *q.scale.stride(),
        PARTS=parts,
        OF_PART=of_part,
        WHOLE=width % BLOCK == 0,
        BLOCKS=_BLOCKS,
        BLOCK=BLOCK,
        num_warps=_WARPS,
        **constants,
    )
