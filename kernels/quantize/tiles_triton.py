"""What the Triton kernels of this package have in common: scales, and the transpose of FP8.

Powers of two are made of exponent bits: nothing is divided, and no mode of rounding or flushing
matters. A conversion to FP8 rounds to nearest even and saturates (cvt.rn.satfinite).

A program that transposes has a block's rows as four tiles, of the rows 4 g, 4 g + 1, 4 g + 2 and
4 g + 3. They have one layout, so a thread has the same channels of four neighbours: converted side
by side, these are a word of the transpose, and words go through shared memory, not bytes.
"""

import torch
import triton
import triton.language as tl

BIASED = {torch.float8_e4m3fn: 135, torch.float8_e5m2: 142}
"""Of a format whose largest number is 0.875 * 2^e: e + 126, frexp's bias of fp32."""


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
    """[R, C] -> [R, C / CHUNK], what a thread finds in its own channels; NaN has no part."""
    chunks: tl.constexpr = x.shape[1] // CHUNK
    return tl.max(tl.abs(tl.reshape(x, [x.shape[0], chunks, CHUNK])), 2)


@triton.jit
def largest_of(a, b, c, d):  # type: ignore[no-untyped-def]
    return tl.maximum(tl.maximum(a, b), tl.maximum(c, d))


@triton.jit
def transposed(a, b, c, d, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """fp32 or FP8 [R, C] each -> FP8 [C, 4 R], of the rows of all in turn."""
    R: tl.constexpr = a.shape[0]
    C: tl.constexpr = a.shape[1]
    rows = tl.join(tl.join(a, c), tl.join(b, d)).to(dtype)
    return tl.reshape(tl.permute(tl.reshape(rows, [R, C, 4]), [1, 0, 2]), [C, 4 * R])
