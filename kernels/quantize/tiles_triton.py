"""Common functions of this package's Triton kernels: scales, and the transpose of FP8.

Powers of two are built from exponent bits: nothing is divided, and no mode of rounding or flushing
matters. A conversion to FP8 rounds to nearest even and saturates (cvt.rn.satfinite).

A program that transposes has a block's rows in TURNS tiles: of 8, tile k has rows k, 8 + k, 16 + k
and so on. All have one layout, so a thread has the same channels of neighbouring rows: converted
together, these are a word of the transpose, and words go through shared memory instead of bytes.
"""

# Tuples of tiles grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl

BIASED = {torch.float8_e4m3fn: 135, torch.float8_e5m2: 142}
"""e + 126, with frexp's bias of fp32, for a format whose largest number is 0.875 * 2^e."""


@triton.jit
def powers(amax, BIASED: tl.constexpr):  # type: ignore[no-untyped-def]
    """`kernels.quantize.blocks.scales` of fp32 amax."""
    bits = amax.to(tl.int32, bitcast=True)
    # frexp's exponent, one more if its mantissa is above 0.875: the addition carries then.
    up = tl.minimum(BIASED + 127 - ((bits + 0x1FFFFF) >> 23), 254) << 23
    usual = (bits - 1).to(tl.uint32, bitcast=True) < 0x7F7FFFFF  # above 0, finite
    up = tl.where(usual, up, 127 << 23)
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
