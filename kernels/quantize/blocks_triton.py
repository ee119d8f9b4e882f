"""FP8 in blocks on an NVIDIA GPU, in Triton: one read and one write of each tensor.

Powers of two are built from exponent bits: nothing is divided, and no mode of rounding or flushing
matters. A conversion to FP8 rounds to nearest even and saturates (cvt.rn.satfinite).

Rows: blocks of all rows are numbered consecutively, and a program has a range of them: its accesses
have the same length for any number of channels, and no thread is idle.

Weights and columns are transposed. A program has a block's rows in TURNS tiles: of 8, tile k has
rows k, 8 + k, 16 + k and so on. All have one layout, so a thread has the same channels of
neighbouring rows: converted together, these are a word of the transpose, and words go through
shared memory instead of bytes. Of columns a program has 128 tokens of an expert, or of the padding
after all experts, by 128 channels. It derives its expert from the offsets: the host knows nothing,
and every column and every scale is written by one program.

Rows in e4m3 are rescaled in fp16, two elements an instruction: the scale of a row is at most twice
that of its block, and a factor below 2^-19, down to which fp16 is exact, leaves nothing of e4m3. It
can of e5m2, which is rescaled in fp32.

Legend: R rows, S expert rows, L experts, C channels, O and I channels out and in, T columns, B
blocks of channels, N = parts * L matrices of O / parts rows.
"""

# Tuples of tiles grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.quantize.blocks import BLOCK, Quantized, QuantizedColumns, block_count

BIASED = {torch.float8_e4m3fn: 135, torch.float8_e5m2: 142}
"""e + 126, with frexp's bias of fp32, for a format whose largest number is 0.875 * 2^e."""


@triton.jit
def powers(amax, BIASED: tl.constexpr):  # type: ignore[no-untyped-def]
    """`kernels.quantize.blocks.scales` of fp32 amax."""
    bits = amax.to(tl.int32, bitcast=True)
    # frexp's exponent, one more if its mantissa is above 0.875: the addition carries then.
    up = tl.minimum(BIASED + 127 - ((bits + 0x1FFFFF) >> 23), 254) << 23
    # Unsigned, 0 - 1 is the largest number: one comparison for both ends.
    usual = (bits - 1).to(tl.uint32, bitcast=True) < 0x7F7FFFFF  # above 0, finite
    # 1 for zeros, and for infinity, whose scale below is NaN.
    up = tl.where(usual, up, 127 << 23)
    # The biased exponents of 2^e and 2^-e add up to 254.
    down = tl.maximum((254 << 23) - up, 1 << 22)  # 2^-127 is denormal
    down = tl.where(bits == 0x7F800000, 0x7FC00000, down)
    return up.to(tl.float32, bitcast=True), down.to(tl.float32, bitcast=True)


@triton.jit
def chunk_amax(x, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """[R, C] -> [R, C / CHUNK]: maxima of the channels of one thread; NaN is ignored."""
    chunks: tl.constexpr = x.shape[1] // CHUNK
    return tl.max(tl.abs(tl.reshape(x, [x.shape[0], chunks, CHUNK])), 2)


@triton.jit
def transposed(tiles, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles of fp32 or fp16 [R, C] -> FP8 [C, R * TURNS] with the tiles' rows interleaved."""
    R: tl.constexpr = tiles[0].shape[0]
    C: tl.constexpr = tiles[0].shape[1]
    TURNS: tl.constexpr = len(tiles)
    # The first join puts the highest bit of a tile's number into a dimension of two, the last one
    # the lowest: flattened, these dimensions are the number, and so the row within TURNS.
    if TURNS == 8:
        rows = _halved(_halved(_halved(tiles)))
    else:
        rows = _halved(_halved(tiles))
    made = tl.reshape(rows[0].to(dtype), [R, C, TURNS])
    return tl.reshape(tl.permute(made, [1, 0, 2]), [C, R * TURNS])


@triton.jit
def _halved(tiles):  # type: ignore[no-untyped-def]
    """Tile k joined with tile k + n / 2, for k below n / 2."""
    half: tl.constexpr = len(tiles) // 2
    joined = ()
    for k in tl.static_range(half):
        joined = joined + (tl.join(tiles[k], tiles[k + half]),)
    return joined


_BLOCKS = 64  # blocks per program
_WARPS = 8


@triton.jit
def locate(  # type: ignore[no-untyped-def]
    blocks,
    width,
    of_part,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program's blocks: row, index in it, first channel, masks of blocks and of elements."""
    # Blocks of all rows and parts are numbered through: a program has BLOCKS of them, wherever rows
    # end. No other program has a part of a block, so that a maximum needs no second pass.
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = (number // (PARTS * of_part)).to(tl.int64)
    of_row = number % (PARTS * of_part)
    in_part = of_row % of_part * BLOCK
    known = number < blocks
    here = known[:, None]
    # Only a short block at the end of a part has channels that are not its own.
    if not WHOLE:
        here = here & (in_part[:, None] + tl.arange(0, BLOCK)[None, :] < width)
    return row, of_row, of_row // of_part * width + in_part, known, here


@triton.jit
def elements(x, x_row, row, channel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointers to the elements of blocks."""
    return x + ((row * x_row + channel)[:, None] + tl.arange(0, BLOCK)[None, :])


@triton.jit
def load_fp32(at, here):  # type: ignore[no-untyped-def]
    """Values in fp32, 0 where there are none."""
    return tl.load(at, mask=here, other=0.0).to(tl.float32)


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
    row, of_row, channel, known, here = locate(blocks, width, OF_PART, PARTS, WHOLE, BLOCKS, BLOCK)
    values = load_fp32(elements(x, x_row, row, channel, BLOCK), here)
    # Values stay in registers from the maximum to the product: x is read once.
    up, down = powers(tl.max(tl.abs(values), 1), BIASED)
    to = elements(data, data_row, row, channel, BLOCK)
    tl.store(to, (values * up[:, None]).to(data.dtype.element_ty), mask=here)
    tl.store(scale + row * scale_row + of_row * scale_block, down, mask=known)


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
    row, of_row, channel, known, here = locate(blocks, width, OF_PART, PARTS, WHOLE, BLOCKS, BLOCK)
    at = scale + row * scale_row + of_row * scale_block
    scales = tl.load(at, mask=known, other=0.0)[:, None]
    values = load_fp32(elements(data, data_row, row, channel, BLOCK), here) * scales
    to = elements(x, x_row, row, channel, BLOCK)
    tl.store(to, values.to(x.dtype.element_ty), mask=here)


def write_rows(x_RC: Tensor, to: Quantized, parts: int) -> None:
    """Write data and scales; channels of x, bf16 or fp32, and data are contiguous."""
    _launch(fp8_rows, x_RC, to, parts, BIASED=BIASED[to.data.dtype])


def dequantize(q: Quantized, to_RC: Tensor, parts: int) -> None:
    """Write values, bf16 or fp32; the strides are those of `write_rows`."""
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


_TURNS = 4
_REGISTERS = {torch.bfloat16: 80, torch.float32: 104}  # of a thread: 3 programs fit on an SM, or 2


@triton.jit
def fp8_weights(  # type: ignore[no-untyped-def]
    w,
    data,
    across_data,
    scale,
    rows,
    outs,
    ins,
    PARTS: tl.constexpr,
    FP8: tl.constexpr,
    BIASED: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program has one block of 128 x 128 of a part of an expert's weights, in the order of scales.
    # It alone reads it and writes both layouts: a scale belongs to both.
    program = tl.program_id(0)
    columns = tl.cdiv(ins, BLOCK)
    blocks = tl.cdiv(rows, BLOCK) * columns
    matrix = program // blocks
    of_matrix = program % blocks
    first_row = of_matrix // columns * BLOCK
    first_channel = of_matrix % columns * BLOCK
    first_out = matrix % PARTS * rows + first_row
    of_expert = (matrix // PARTS).to(tl.int64) * outs * ins
    corner = of_expert + first_out.to(tl.int64) * ins + first_channel

    # Tile k has the rows k, k + TURNS, ...: a thread then holds TURNS neighbouring rows of its
    # channels, one in each tile, which are a word of the transpose.
    row = TURNS * tl.arange(0, BLOCK // TURNS)
    i = tl.arange(0, BLOCK)
    known = first_channel + i < ins
    at = row[:, None] * ins + i[None, :]
    values = ()
    # Maxima of a thread's 8 channels, which need no exchange; threads meet once, behind the loop.
    amax = tl.zeros([BLOCK // TURNS, BLOCK // 8], tl.float32)
    for k in tl.static_range(TURNS):
        here = (first_row + row + k < rows)[:, None] & known[None, :]
        x = tl.load(w + corner + k * ins + at, mask=here, other=0.0).to(tl.float32)
        values = values + (x,)
        amax = tl.maximum(amax, chunk_amax(x, 8))
    up, down = powers(tl.max(amax), BIASED)
    tl.store(scale + program, down)
    made = ()
    for k in tl.static_range(TURNS):
        here = (first_row + row + k < rows)[:, None] & known[None, :]
        made = made + (values[k] * up,)
        # A layout that is not wanted is None, and its code is not compiled.
        if data is not None:
            tl.store(data + corner + k * ins + at, made[k].to(FP8), mask=here)
    if across_data is not None:
        across_data += of_expert + first_channel.to(tl.int64) * outs + first_out
        to = i[:, None] * outs + i[None, :]
        here = known[:, None] & (first_row + i < rows)[None, :]
        tl.store(across_data + to, transposed(made, FP8), mask=here)


def write_weights(
    w_LOI: Tensor, data_LOI: Tensor | None, data_LIO: Tensor | None, scale: Tensor, parts: int
) -> None:
    """Write one layout or both in e4m3, and the scales; all contiguous, w bf16 or fp32."""
    O, I = w_LOI.shape[1:]  # noqa: E741
    blocks = scale.numel()
    if not blocks:
        return
    fp8_weights[(blocks,)](
        w_LOI,
        data_LOI,
        data_LIO,
        scale,
        O // parts,
        O,
        I,
        PARTS=parts,
        FP8=tl.float8e4nv,
        BIASED=BIASED[torch.float8_e4m3fn],
        TURNS=_TURNS,
        BLOCK=BLOCK,
        num_warps=_WARPS,
        maxnreg=_REGISTERS[w_LOI.dtype],
    )


_TRANSPOSE_REGISTERS = 48  # of a thread on FP8: 5 programs on an SM, with 80 KB in flight


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
    # Every program looks at all offsets: a search by one vector, and no table from a kernel before.
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
    # A program has 128 tokens of an expert, or of padding, by 128 channels. Its neighbours have the
    # same tokens, whose blocks of channels lie side by side in memory.
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
            # The index past an expert's end is another expert's, or anything.
            row = tl.load(index + row, mask=inside, other=0).to(tl.int64)
        # Tokens past the end are 0, which adds nothing to a weight gradient.
        here = inside[:, None]
        if not WHOLE:
            here = here & known[None, :]
        at = (row * x_row)[:, None] + i[None, :]
        values = values + (tl.load(x + channel + at, mask=here, other=0.0),)
        if SCALED:
            given = x_scale + of_row * xs_block + row * xs_row
            scales = scales + (tl.load(given, mask=inside, other=1.0)[:, None],)

    made = ()
    # All tiles are in flight before the first maximum: programs are bound by memory.
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
    # Also where the block is padding: no stage of the GEMM has to be cleared.
    data += channel.to(tl.int64) * T + block * BLOCK
    to = data + (i[:, None] * T + i[None, :])
    tl.store(to, transposed(made, data.dtype.element_ty), mask=known[:, None])


def write_columns(
    x: Tensor,
    x_scale: Tensor | None,
    index_S: Tensor | None,
    offsets: Tensor,
    to: QuantizedColumns,
    parts: int,
) -> None:
    """Write contiguous data and scales.

    Args:
        x: [any, C], contiguous channels: bf16 or fp32, or FP8 with scales.
        x_scale: fp32 [any, parts * B_C/parts], any strides.
        index_S: int32, rows of x; None for its first S rows.
        offsets: int32 [L + 1].
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
