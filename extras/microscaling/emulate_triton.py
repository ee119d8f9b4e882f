"""`extras.microscaling.emulated` on an NVIDIA GPU, in Triton: one read and one write of an operand.

NVFP4 needs another read first, for the largest magnitude of each tensor and the key of its random
bits. Rounding adds and subtracts a power of two, and scales are built from exponent bits: all is
fp32 and integers, and runs on GPUs without FP8 too.

`row_blocks` has blocks along channels. `column_blocks` has those along rows, and 16 x 16: a program
holds the rows of one block side by side, so that sums and maxima over rows need no other thread.

Legend: S rows, C channels, L experts, G groups of rows that share blocks, B blocks of a row.
"""

# Tuples of rows grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment,attr-defined"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.extras.microscaling.nvfp4 import GOLDEN, LARGEST, MURMUR, SIGNS
from phalanx.kernels.quantize.blocks_triton import elements, load_fp32, locate

_NEGATIVE = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
_ELEMENTS = 2048  # elements per program of `row_blocks`
_CHANNELS = 256  # channels per program of `column_blocks`
_SPAN = 1024  # channels that a program of `row_amax` reads at a time


class Scales(NamedTuple):
    """Factors of `nvfp4._quantize` for each expert's tensor."""

    factor_L: Tensor  # fp32: S / 6
    inverse_L: Tensor  # fp32: 1 / S
    key_L: Tensor | None  # int32 key of stochastic rounding; None: round to nearest


@triton.jit
def sign_of(x, magnitude):  # type: ignore[no-untyped-def]
    """fp32 magnitude with the sign of x."""
    sign = x.to(tl.uint32, bitcast=True) & 0x80000000
    return (magnitude.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(v):  # type: ignore[no-untyped-def]
    """fp32 from 0 to 448 -> the nearest e4m3, the even one of two; NaN stays."""
    exponent = tl.maximum(
        v.to(tl.int32, bitcast=True) >> 23, 121
    )  # of its last place, 2^-9 at least
    ulp = ((exponent + 20) << 23).to(tl.float32, bitcast=True)
    return (v + ulp) - ulp


@triton.jit
def limited(v, most):  # type: ignore[no-untyped-def]
    """min(v, most), with NaN."""
    return tl.where(v > most, most, v)


@triton.jit
def mxfp8_values(x, amax):  # type: ignore[no-untyped-def]
    """fp32 x in a block of this amax after MXFP8."""
    bits = (amax * (1 / 448)).to(tl.int32, bitcast=True)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    above = (mantissa > 0) & ((exponent > 0) | (mantissa > 0x400000))
    code = tl.minimum(exponent + above.to(tl.int32), 254)
    scale = tl.where(code > 0, code << 23, 1 << 22).to(tl.float32, bitcast=True)
    inverse = tl.where(code < 254, (254 - code) << 23, 1 << 22).to(tl.float32, bitcast=True)
    y = x * inverse
    return sign_of(y, to_e4m3(limited(tl.abs(y), 448.0))) * scale


@triton.jit
def nvfp4_values(x, amax, factor, inverse, random, STOCHASTIC: tl.constexpr, LARGEST: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 e2m1 * scale of x in a block of this amax; `random` is uniform in [0, 1)."""
    scale = to_e4m3(limited(amax * factor, 448.0))
    encode = limited(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale * inverse), LARGEST)
    y = x * encode
    v = limited(tl.abs(y), 6.0)
    exponent = tl.maximum(v.to(tl.int32, bitcast=True) >> 23, 127)
    if STOCHASTIC:
        step = ((exponent - 1) << 23).to(tl.float32, bitcast=True)
        per_step = ((255 - exponent) << 23).to(tl.float32, bitcast=True)
        below = (v * per_step).to(tl.int32).to(tl.float32) * step
        v = below + tl.where(v - below > random * step, step, 0.0)
    else:
        ulp = ((exponent + 22) << 23).to(tl.float32, bitcast=True)
        v = (v + ulp) - ulp
    return sign_of(y, v) * scale


@triton.jit
def uniform(key, element, GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
    """`nvfp4.uniform`; element is uint32."""
    h = element * GOLDEN + key.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * FIRST
    h = (h ^ (h >> 13)) * SECOND
    return ((h ^ (h >> 16)) >> 8).to(tl.float32) * (1 / 16777216)


@triton.jit
def checksum(x, element, GOLDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint32: what elements add to `nvfp4.keys`."""
    bits = x.to(tl.uint32, bitcast=True)
    return (bits ^ (bits >> 16)) * ((element * GOLDEN) | 1)


@triton.jit
def row_amax(  # type: ignore[no-untyped-def]
    x,
    row_in,
    amax,
    keys,
    C,
    x_row,
    KEYS: tl.constexpr,
    GOLDEN: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Bits of the largest magnitude of each row, and with KEYS its summand of its tensor's key."""
    row = tl.program_id(0)
    largest = tl.zeros([SPAN], tl.int32)
    total = tl.zeros([SPAN], tl.uint32)
    base = x + row.to(tl.int64) * x_row
    if KEYS:
        place_of = tl.load(row_in + row).to(tl.uint32) * C
    for first in range(0, C, SPAN):
        channel = first + tl.arange(0, SPAN)
        values = tl.load(base + channel, mask=channel < C, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values).to(tl.int32, bitcast=True))
        if KEYS:
            total += checksum(values, place_of + channel.to(tl.uint32), GOLDEN)
    tl.store(amax + row, tl.max(largest, 0))
    if KEYS:
        tl.store(keys + row, tl.sum(total, 0).to(tl.int32, bitcast=True))


# A second to compile, which all widths share that are whole blocks.
@triton.jit(do_not_specialize=["blocks", "of_part"])
def row_blocks(  # type: ignore[no-untyped-def]
    x,
    out,
    expert,
    row_in,
    factors,
    inverses,
    keys,
    blocks,
    width,
    of_part,
    C,
    x_row,
    out_row,
    NVFP4: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    LARGEST: tl.constexpr,
):
    located = locate(blocks, width, of_part, PARTS, WHOLE, BLOCKS, BLOCK)
    row, _, channel, known, here = located
    i = tl.arange(0, BLOCK)[None, :]
    values = load_fp32(elements(x, x_row, row, channel, BLOCK), here)
    amax = tl.max(tl.abs(values), 1)[:, None]
    if NVFP4:
        e = tl.load(expert + row, mask=known, other=0)
        factor, inverse = tl.load(factors + e)[:, None], tl.load(inverses + e)[:, None]
        random = 0.0
        if STOCHASTIC:
            first = tl.load(row_in + row, mask=known, other=0).to(tl.uint32) * C
            element = (first + channel.to(tl.uint32))[:, None] + i.to(tl.uint32)
            random = uniform(tl.load(keys + e)[:, None], element, GOLDEN, FIRST, SECOND)
        made = nvfp4_values(values, amax, factor, inverse, random, STOCHASTIC, LARGEST)
    else:
        made = mxfp8_values(values, amax)
    to = elements(out, out_row, row, channel, BLOCK)
    tl.store(to, made.to(out.dtype.element_ty), mask=here)


@triton.jit
def group_of(  # type: ignore[no-untyped-def]
    x,
    table,
    number,
    G,
    channel,
    known,
    x_row,
    NEGATIVE: tl.constexpr,
    ROTATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The rows of a group in fp32, 0 where it has none; rotated, rounded to bf16."""
    first = tl.load(table + number).to(tl.int64)
    left = tl.load(table + G + number)
    rows = ()
    for i in tl.static_range(ROWS):
        here = known & (i < left)
        row = tl.load(x + (first + i) * x_row + channel, mask=here, other=0.0).to(tl.float32)
        if ROTATED:
            if (NEGATIVE >> i) & 1:
                row = -row
        rows = rows + (row,)
    if ROTATED:
        for stage in tl.static_range(4):
            turned = ()
            for i in tl.static_range(ROWS):
                if (i >> stage) & 1:
                    turned = turned + (rows[i ^ (1 << stage)] - rows[i],)
                else:
                    turned = turned + (rows[i] + rows[i ^ (1 << stage)],)
            rows = turned
        rounded = ()
        for i in tl.static_range(ROWS):
            rounded = rounded + ((rows[i] * 0.25 + 0.0).to(tl.bfloat16).to(tl.float32),)
        rows = rounded
    return rows


@triton.jit
def column_amax(  # type: ignore[no-untyped-def]
    x,
    table,
    amax,
    keys,
    G,
    C,
    tiles,
    x_row,
    KEYS: tl.constexpr,
    NEGATIVE: tl.constexpr,
    GOLDEN: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """`row_amax` for rotated groups, and CHANNELS of their channels."""
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    channel = tile * CHANNELS + tl.arange(0, CHANNELS)
    known = channel < C
    rows = group_of(x, table, number, G, channel, known, x_row, NEGATIVE, True, ROWS)
    largest = tl.zeros([CHANNELS], tl.int32)
    total = tl.zeros([CHANNELS], tl.uint32)
    if KEYS:
        place_of = tl.load(table + 4 * G + number).to(tl.uint32)
    for i in tl.static_range(ROWS):
        largest = tl.maximum(largest, tl.abs(rows[i]).to(tl.int32, bitcast=True))
        if KEYS:
            element = (place_of + i) * C + channel.to(tl.uint32)
            total += tl.where(known, checksum(rows[i], element, GOLDEN), 0)
    tl.store(amax + tl.program_id(0), tl.max(largest, 0))
    if KEYS:
        tl.store(keys + tl.program_id(0), tl.sum(total, 0).to(tl.int32, bitcast=True))


# 32 rows take four seconds to compile, which a model's dozen widths share if all are multiples of
# 16: only of such a width is it known that channels can be loaded in twos.
@triton.jit(do_not_specialize=["tiles", "of_part"])
def column_blocks(  # type: ignore[no-untyped-def]
    x,
    out,
    table,
    factors,
    inverses,
    keys,
    G,
    tiles,
    of_part,
    width,
    C,
    x_row,
    out_row,
    NVFP4: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROTATED: tl.constexpr,
    SQUARE: tl.constexpr,
    ALL_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    NEGATIVE: tl.constexpr,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    LARGEST: tl.constexpr,
):
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    in_part = tile % of_part * CHANNELS + tl.arange(0, CHANNELS)
    known = in_part < width
    channel = tile // of_part * width + in_part
    rows = group_of(x, table, number, G, channel, known, x_row, NEGATIVE, ROTATED, ROWS)
    amax = tl.zeros([CHANNELS], tl.float32)
    for i in tl.static_range(ROWS):
        amax = tl.maximum(amax, tl.abs(rows[i]))
    if SQUARE:
        largest = tl.max(tl.reshape(amax, [CHANNELS // ROWS, ROWS]), 1)[:, None]
        wide = tl.broadcast_to(largest, [CHANNELS // ROWS, ROWS])
        amax = tl.reshape(wide, [CHANNELS])
    if NVFP4:
        e = tl.load(table + 3 * G + number)
        factor, inverse = tl.load(factors + e), tl.load(inverses + e)
    if STOCHASTIC:
        key, place_of = tl.load(keys + e), tl.load(table + 4 * G + number).to(tl.uint32)
    last = ROWS if ALL_ROWS else tl.load(table + G + number)
    to = out + tl.load(table + 2 * G + number).to(tl.int64) * out_row + channel
    for i in tl.static_range(ROWS):
        if NVFP4:
            random = 0.0
            if STOCHASTIC:
                element = (place_of + i) * C + channel.to(tl.uint32)
                random = uniform(key, element, GOLDEN, FIRST, SECOND)
            made = nvfp4_values(rows[i], amax, factor, inverse, random, STOCHASTIC, LARGEST)
        else:
            made = mxfp8_values(rows[i], amax)
        tl.store(to + i * out_row, made.to(out.dtype.element_ty), mask=known & (i < last))


def amax_of_rows(x_SC: Tensor, row_in_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """int32 [S]: bits of magnitudes and, with the rows' indices in their tensors, keys."""
    S, C = x_SC.shape
    amax, keys = (torch.empty(S, dtype=torch.int32, device=x_SC.device) for _ in range(2))
    if S:
        keyed = row_in_S is not None
        row_amax[(S,)](
            x_SC,
            row_in_S if keyed else amax,
            amax,
            keys,
            C,
            x_SC.stride(0),
            KEYS=keyed,
            GOLDEN=GOLDEN,
            SPAN=_SPAN,
            num_warps=4,
        )
    return amax, keys


def amax_of_groups(x_SC: Tensor, table_5G: Tensor, *, keyed: bool) -> tuple[Tensor, Tensor]:
    """`amax_of_rows` for rotated groups of 16 rows: int32 [G, tiles]."""
    C, G = x_SC.shape[1], table_5G.shape[1]
    tiles = triton.cdiv(C, _CHANNELS)
    amax, keys = (torch.empty(G, tiles, dtype=torch.int32, device=x_SC.device) for _ in range(2))
    if G * tiles:
        column_amax[(G * tiles,)](
            x_SC,
            table_5G,
            amax,
            keys,
            G,
            C,
            tiles,
            x_SC.stride(0),
            KEYS=keyed,
            NEGATIVE=_NEGATIVE,
            GOLDEN=GOLDEN,
            ROWS=16,
            CHANNELS=_CHANNELS,
            num_warps=4,
        )
    return amax, keys


def rows(
    x_SC: Tensor,
    parts: int,
    *,
    block: int,
    scales: Scales | None = None,
    expert_S: Tensor | None = None,
    row_in_S: Tensor | None = None,
) -> Tensor:
    """Values of blocks along channels.

    Args:
        x_SC: bf16 or fp32 with contiguous channels.
        parts: equal ranges of C.
        block: 32 for MXFP8, 16 for NVFP4, with `scales`.
        expert_S, row_in_S: int32, expert whose scales a row takes, and its index in the tensor.
    """
    (S, C), out = x_SC.shape, torch.empty_like(x_SC, memory_format=torch.contiguous_format)
    width = C // parts
    of_part = triton.cdiv(width, block)
    blocks, in_program = S * parts * of_part, _ELEMENTS // block
    if not blocks:
        return out
    factor, inverse, key = (out, out, None) if scales is None else scales
    row_blocks[(triton.cdiv(blocks, in_program),)](
        x_SC,
        out,
        out if expert_S is None else expert_S,
        out if row_in_S is None else row_in_S,
        factor,
        inverse,
        out if key is None else key,
        blocks,
        width,
        of_part,
        C,
        x_SC.stride(0),
        C,
        NVFP4=scales is not None,
        STOCHASTIC=key is not None,
        PARTS=parts,
        WHOLE=width % block == 0,
        BLOCKS=in_program,
        BLOCK=block,
        GOLDEN=GOLDEN,
        FIRST=MURMUR[0],
        SECOND=MURMUR[1],
        LARGEST=LARGEST,
        num_warps=4,
    )
    return out


def columns(
    x_SC: Tensor,
    table_5G: Tensor,
    to_TC: Tensor,
    parts: int = 1,
    *,
    block: int,
    scales: Scales | None = None,
    of_weights: bool = False,
) -> None:
    """Values of blocks along rows, or of squares, written to contiguous `to_TC`.

    Args:
        x_SC: bf16 or fp32 with contiguous channels.
        table_5G: int32, for each group of `block` rows: its first row in x, its number of rows, its
            first row in the result, its expert, and the index of its first row in that tensor.
        parts: equal ranges of C.
        block: 32 for MXFP8, 16 for NVFP4, with `scales`.
        of_weights: NVFP4 has squares and no rotation, and rows that a group lacks are not written.
    """
    C, G = x_SC.shape[1], table_5G.shape[1]
    width = C // parts
    of_part = triton.cdiv(width, _CHANNELS)
    if not G * C:
        return
    factor, inverse, key = (to_TC, to_TC, None) if scales is None else scales
    column_blocks[(G * parts * of_part,)](
        x_SC,
        to_TC,
        table_5G,
        factor,
        inverse,
        to_TC if key is None else key,
        G,
        parts * of_part,
        of_part,
        width,
        C,
        x_SC.stride(0),
        C,
        NVFP4=scales is not None,
        STOCHASTIC=key is not None,
        ROTATED=scales is not None and not of_weights,
        SQUARE=scales is not None and of_weights,
        ALL_ROWS=not of_weights,
        ROWS=block,
        CHANNELS=_CHANNELS,
        NEGATIVE=_NEGATIVE,
        GOLDEN=GOLDEN,
        FIRST=MURMUR[0],
        SECOND=MURMUR[1],
        LARGEST=LARGEST,
        num_warps=4,
    )
