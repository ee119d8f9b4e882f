"""`quantize_columns` and `transpose_rows` on an NVIDIA GPU, in Triton: one read, one write.

A program has 128 tokens of an expert, or of the padding after all experts, by 128 channels, and the
tokens as `tiles_triton` has rows. What expert it belongs to it finds from the offsets: nothing is
known on the host, and every column and every scale is written by one program.

Legend: S expert rows, L experts, C channels, T columns, B blocks of channels.
"""

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.quantize.blocks import BLOCK, QuantizedColumns, block_count
from phalanx.kernels.quantize.tiles_triton import (
    BIASED,
    chunk_amax,
    largest_of,
    powers,
    transposed,
)

_WARPS = 8


@triton.jit
def tokens_of(offsets, block, L, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row of a block of tokens, and the end of its expert's; 0 and 0 if it is no one's.

    Experts begin new blocks in the transpose; this one is the first whose blocks end after `block`.
    """
    e = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + e, mask=e < L, other=0)
    end = tl.load(offsets + e + 1, mask=e < L, other=0)
    ends = tl.cumsum((end - begin + BLOCK - 1) // BLOCK, 0)
    before = ends <= block
    expert = tl.sum(before.to(tl.int32), 0)
    blocks_before = tl.max(tl.where(before, ends, 0), 0)
    known = expert < L
    first = tl.load(offsets + expert, mask=known, other=0)
    last = tl.load(offsets + expert + 1, mask=known, other=0)
    return tl.where(known, first + (block - blocks_before) * BLOCK, 0), last


@triton.jit
def expert_rows(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    index,
    row,
    last,
    first_channel,
    x_row,
    xs_row,
    known,
    SCALED: tl.constexpr,
    INDEXED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Values and scales of expert rows; 0 and 1 from row `last` on."""
    i = tl.arange(0, known.shape[0])
    inside = row < last
    row = row.to(tl.int64)
    if INDEXED:
        row = tl.load(index + row, mask=inside, other=0).to(tl.int64)
    here = inside[:, None]
    if not WHOLE:
        here = here & known[None, :]
    at = (row * x_row + first_channel)[:, None] + i[None, :]
    values = tl.load(x + at, mask=here, other=0.0)
    if SCALED:
        scales = tl.load(x_scale + row * xs_row, mask=inside, other=1.0)[:, None]
    else:
        scales = 1.0
    return values, scales


@triton.jit
def tile_amax(values, scales, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 [rows, chunks]; FP8 is compared as fp16, which has all its numbers."""
    if SCALED:
        amax = chunk_amax(values.to(tl.float16), 16).to(tl.float32) * scales
    else:
        amax = chunk_amax(values.to(tl.float32), 8)
    return amax


@triton.jit
def scaled(values, scales, up, SCALED: tl.constexpr):  # type: ignore[no-untyped-def]
    """values * scales * up with one multiplication of an element.

    The factor is larger than fp32 has numbers only where scales are of rows of zeros.
    """
    if SCALED:
        factor = scales * up
        factor = tl.where(factor == float("inf"), 1.0, factor)
    else:
        factor = up
    return values.to(tl.float32) * factor


@triton.jit
def fp8_columns(  # type: ignore[no-untyped-def]
    x,
    x_scale,
    index,
    offsets,
    data,
    scale,
    L,
    T,
    width,
    x_row,
    xs_row,
    xs_block,
    scale_row,
    SCALED: tl.constexpr,
    INDEXED: tl.constexpr,
    SQUARE: tl.constexpr,
    PARTS: tl.constexpr,
    OF_PART: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) // (PARTS * OF_PART)
    of_row = tl.program_id(0) % (PARTS * OF_PART)
    of_part = of_row % OF_PART * BLOCK
    channel = of_row // OF_PART * width + of_part
    first, last = tokens_of(offsets, block, L, EXPERTS, BLOCK)
    i = tl.arange(0, BLOCK)
    known = of_part + i < width
    row = first + 4 * tl.arange(0, BLOCK // 4)
    if SCALED:
        x_scale += of_row * xs_block
    x0, s0 = expert_rows(
        x, x_scale, index, row, last, channel, x_row, xs_row, known, SCALED, INDEXED, WHOLE
    )
    x1, s1 = expert_rows(
        x, x_scale, index, row + 1, last, channel, x_row, xs_row, known, SCALED, INDEXED, WHOLE
    )
    x2, s2 = expert_rows(
        x, x_scale, index, row + 2, last, channel, x_row, xs_row, known, SCALED, INDEXED, WHOLE
    )
    x3, s3 = expert_rows(
        x, x_scale, index, row + 3, last, channel, x_row, xs_row, known, SCALED, INDEXED, WHOLE
    )
    to_scale = scale + block.to(tl.int64) * scale_row
    if SQUARE:
        amax = largest_of(
            tile_amax(x0, s0, SCALED),
            tile_amax(x1, s1, SCALED),
            tile_amax(x2, s2, SCALED),
            tile_amax(x3, s3, SCALED),
        )
        up, down = powers(tl.max(amax), BIASED)
        tl.store(to_scale + of_row, down)
        x0 = scaled(x0, s0, up, SCALED)
        x1 = scaled(x1, s1, up, SCALED)
        x2 = scaled(x2, s2, up, SCALED)
        x3 = scaled(x3, s3, up, SCALED)
    else:
        x0 = x0.to(tl.float32) * s0
        x1 = x1.to(tl.float32) * s1
        x2 = x2.to(tl.float32) * s2
        x3 = x3.to(tl.float32) * s3
        amax = tl.max(largest_of(tl.abs(x0), tl.abs(x1), tl.abs(x2), tl.abs(x3)), 0)
        up, down = powers(amax, BIASED)
        tl.store(to_scale + channel + i, down, mask=known)
        up = up[None, :]
        x0 *= up
        x1 *= up
        x2 *= up
        x3 *= up
    made = transposed(x0, x1, x2, x3, data.dtype.element_ty)
    to = data + ((channel + i).to(tl.int64) * T + block * BLOCK)[:, None] + i[None, :]
    tl.store(to, made, mask=known[:, None])


def quantize(
    x: Tensor,
    x_scale: Tensor | None,
    index_S: Tensor | None,
    offsets: Tensor,
    to: QuantizedColumns,
    parts: int,
) -> None:
    """Write data and scales.

    Args:
        x: [any, C], contiguous channels: bf16 or fp32, or FP8 with scales.
        x_scale: fp32 [any, parts * B_C/parts], any strides.
        index_S: int32, rows of x; None for its first S rows.
        offsets: int32 [L + 1].
        to: contiguous.
        parts: of C.
    """
    (C, T), L = to.data_CT.shape, len(offsets) - 1
    if not to.data_CT.numel():
        return
    across = block_count(C, parts)
    fp8_columns[(T // BLOCK * across,)](
        x,
        x_scale,
        index_S,
        offsets,
        to.data_CT,
        to.scale,
        L,
        T,
        C // parts,
        x.stride(0),
        *((0, 0) if x_scale is None else x_scale.stride()),
        to.scale.stride(0),
        SCALED=x_scale is not None,
        INDEXED=index_S is not None,
        SQUARE=to.blocks == "square",
        PARTS=parts,
        OF_PART=across // parts,
        WHOLE=C // parts % BLOCK == 0,
        BIASED=BIASED[to.data_CT.dtype],
        EXPERTS=triton.next_power_of_2(L),
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )
