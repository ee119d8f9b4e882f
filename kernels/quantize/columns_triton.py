"""`quantize_columns` and `transpose_rows` on an NVIDIA GPU, in Triton: one read, one write.

A program has 128 tokens of an expert, or of the padding after all experts, by 128 channels, with
the tokens arranged as rows in `tiles_triton`. It derives its expert from the offsets: the host
knows nothing, and every column and every scale is written by one program.

Rows in e4m3 are rescaled in fp16, two elements an instruction: the scale of a row is at most twice
that of its block, and a factor below 2^-19, down to which fp16 is exact, leaves nothing of e4m3. It
can of e5m2, which is rescaled in fp32.

Legend: S expert rows, L experts, C channels, T columns, B blocks of channels.
"""

# Tuples of tiles grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.quantize.blocks import BLOCK, QuantizedColumns, block_count
from phalanx.kernels.quantize.tiles_triton import (
    BIASED,
    chunk_amax,
    powers,
    transposed,
)

_WARPS = 8
_TRANSPOSE_REGISTERS = 48
"""Registers of a thread that transposes FP8: 5 programs on an SM, with 80 KB in flight."""


@triton.jit
def last_blocks(offsets, e, L, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of blocks of experts 0 to e."""
    begin = tl.load(offsets + e, mask=e < L, other=0)
    end = tl.load(offsets + e + 1, mask=e < L, other=0)
    return tl.cumsum((end - begin + BLOCK - 1) // BLOCK, 0)


@triton.jit
def fp8_column_offsets(offsets, to, L, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    e = tl.arange(0, EXPERTS)
    tl.store(to, 0)
    tl.store(to + 1 + e, last_blocks(offsets, e, L, BLOCK) * BLOCK, mask=e < L)


@triton.jit
def tokens_of(offsets, block, L, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row of a block of tokens, and the end of its expert's rows; 0 and 0 without an expert.

    Experts start new blocks in the transpose; this one is the first whose blocks end after `block`.
    """
    e = tl.arange(0, EXPERTS)
    ends = last_blocks(offsets, e, L, BLOCK)
    before = ends <= block
    expert = tl.sum(before.to(tl.int32), 0)
    blocks_before = tl.max(tl.where(before, ends, 0), 0)
    known = expert < L
    first = tl.load(offsets + expert, mask=known, other=0)
    last = tl.load(offsets + expert + 1, mask=known, other=0)
    return tl.where(known, first + (block - blocks_before) * BLOCK, 0), last


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
    PARTS: tl.constexpr,
    OF_PART: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    HALF: tl.constexpr,
    EXPERTS: tl.constexpr,
    TURNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0) // (PARTS * OF_PART)
    of_row = tl.program_id(0) % (PARTS * OF_PART)
    of_part = of_row % OF_PART * BLOCK
    channel = of_row // OF_PART * width + of_part
    first, last = tokens_of(offsets, block, L, EXPERTS, BLOCK)
    i = tl.arange(0, BLOCK)
    known = of_part + i < width

    values = ()
    scales = ()
    for k in tl.static_range(TURNS):
        row = first + k + TURNS * tl.arange(0, BLOCK // TURNS)
        inside = row < last
        row = row.to(tl.int64)
        if INDEXED:
            row = tl.load(index + row, mask=inside, other=0).to(tl.int64)
        here = inside[:, None]
        if not WHOLE:
            here = here & known[None, :]
        at = (row * x_row)[:, None] + i[None, :]
        values = values + (tl.load(x + channel + at, mask=here, other=0.0),)
        if SCALED:
            given = x_scale + of_row * xs_block + row * xs_row
            scales = scales + (tl.load(given, mask=inside, other=1.0)[:, None],)

    made = ()
    to_scale = scale + block.to(tl.int64) * scale_row
    largest = tl.zeros([BLOCK // TURNS, BLOCK // CHUNK], tl.float32)
    for k in tl.static_range(TURNS):
        if SCALED:  # fp16 has all numbers of FP8, and is compared in pairs
            amax = chunk_amax(values[k].to(tl.float16), CHUNK).to(tl.float32) * scales[k]
        else:
            amax = chunk_amax(values[k].to(tl.float32), CHUNK)
        largest = tl.maximum(largest, amax)
    up, down = powers(tl.max(largest), BIASED)
    tl.store(to_scale + of_row, down)
    for k in tl.static_range(TURNS):
        factor = up
        if SCALED:
            # Of a row of zeros, whose scale may be anything, it can be too large.
            factor = tl.where(scales[k] * up > 32768.0, 32768.0, scales[k] * up)
        if HALF:
            made = made + (values[k].to(tl.float16) * factor.to(tl.float16),)
        else:
            made = made + (values[k].to(tl.float32) * factor,)
    data += channel.to(tl.int64) * T + block * BLOCK
    to = data + (i[:, None] * T + i[None, :])
    tl.store(to, transposed(made, data.dtype.element_ty), mask=known[:, None])


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
    # A thread loads 16 bytes of a row.
    turns, registers = (8, None) if x_scale is None else (4, _TRANSPOSE_REGISTERS)
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
        PARTS=parts,
        OF_PART=across // parts,
        WHOLE=C // parts % BLOCK == 0,
        BIASED=BIASED[to.data_CT.dtype],
        HALF=x.dtype == torch.float8_e4m3fn,
        EXPERTS=triton.next_power_of_2(L),
        TURNS=turns,
        CHUNK=64 // turns,
        BLOCK=BLOCK,
        num_warps=_WARPS,
        maxnreg=registers,
    )


def starts(offsets: Tensor, to: Tensor) -> None:
    """Write `column_offsets` of int32 [L + 1] to another."""
    L = len(offsets) - 1
    sizes = dict(EXPERTS=triton.next_power_of_2(L), BLOCK=BLOCK)
    fp8_column_offsets[(1,)](offsets, to, L, **sizes, num_warps=1)
