"""Rotary embedding on an NVIDIA GPU, in Triton: heads of any strides to heads of any strides.

Each channel is read and written once. A program has all the heads of a few positions if they fit,
so sines and cosines are computed once per position; they and the products are fp32.

Legend: S positions, B batch, G groups of R heads, d channels.
"""

import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # channels per program


@triton.jit
def cos_sin(angle):  # type: ignore[no-untyped-def]
    """Cosine and sine of fp32 angles up to 2^20, to 1e-7.

    Less code than libdevice's, and no slow branch. The nearest multiple of pi / 2 is subtracted in
    two parts, the first exactly, since an FMA does not round its product; the polynomials are those
    of the Cephes library.
    """
    # 2 / pi, and pi / 2 as an fp32 and what it lacks.
    n = tl.floor(angle * 0.6366197723675814 + 0.5)
    r = tl.fma(n, -1.5707963705062866, angle)
    r = tl.fma(n, 4.371139000186241e-08, r)
    z = r * r
    sin = r + r * z * (-1.6666654611e-1 + z * (8.3321608736e-3 - z * 1.9515295891e-4))
    cos = 1.0 - 0.5 * z + z * z * (4.166664568e-2 + z * (-1.388731625e-3 + z * 2.443315712e-5))
    # angle = r + n * pi / 2: each quarter swaps the two functions, and two of four change a sign.
    quarter = n.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    c = tl.where(odd, sin, cos)
    s = tl.where(odd, cos, sin)
    return tl.where((quarter == 1) | (quarter == 2), -c, c), tl.where(quarter >= 2, -s, s)


@triton.jit
def rotated(u, v, cos, sin):  # type: ignore[no-untyped-def]
    """Pairs (u, v) rotated: a rounded product plus an exact one, the same for every caller."""
    return tl.fma(u, cos, -(v * sin)), tl.fma(v, cos, u * sin)


@triton.jit
def rotated_to(u, v, cos, sin, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """`rotated` in fp32, rounded to a dtype."""
    p, q = rotated(u.to(tl.float32), v.to(tl.float32), cos, sin)
    return p.to(dtype), q.to(dtype)


@triton.jit
def rope_rotate(  # type: ignore[no-untyped-def]
    x,
    y,
    freqs,
    mscale,
    rows,
    B,
    H,
    R,
    x_s,
    x_b,
    x_g,
    x_r,
    y_s,
    y_b,
    y_g,
    y_r,
    f_s,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS_IN: tl.constexpr,
    PAIRS_OUT: tl.constexpr,
    INVERSE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    # A program has ROWS positions, of S and B flattened, and HEADS heads with all of their
    # channels: what it reads and writes, no other program touches, also in place.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s = row // B
    b = row % B
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    g = h // R
    r = h % R
    from_ = x + ((s * x_s + b * x_b)[:, None] + (g * x_g + r * x_r)[None, :])[:, :, None]
    to = y + ((s * y_s + b * y_b)[:, None] + (g * y_g + r * y_r)[None, :])[:, :, None]
    head_here = ((row < rows)[:, None] & (h < H)[None, :])[:, :, None]

    i = tl.arange(0, HALF_BLOCK)
    known = (row < rows)[:, None] & (i < HALF)[None, :]
    # Of positions alone: heads and batch share them.
    angle = tl.load(freqs + s[:, None] * f_s + i[None, :], mask=known, other=0.0)
    cos, sin = cos_sin(angle)
    cos = (cos * mscale)[:, None, :]
    sin = (sin * mscale)[:, None, :]
    # The inverse rotation, which is also the gradient's; the factor stays.
    if INVERSE:
        sin = -sin
    # Adjacent channels are read and written together, by wide accesses, and split in registers.
    at = (FIRST + i)[None, None, :]
    here = head_here & (i < HALF)[None, None, :]
    j = tl.arange(0, 2 * HALF_BLOCK)
    at_both = (FIRST + j)[None, None, :]
    both_here = head_here & (j < 2 * HALF)[None, None, :]
    if PAIRS_IN:
        pairs = tl.load(from_ + at_both, mask=both_here, other=0.0)
        u, v = tl.split(tl.reshape(pairs, [ROWS, HEADS, HALF_BLOCK, 2]))
    else:
        u = tl.load(from_ + at, mask=here, other=0.0)
        v = tl.load(from_ + at + HALF, mask=here, other=0.0)
    p, q = rotated_to(u, v, cos, sin, y.dtype.element_ty)
    # No thread may write before all have read: threads split loads and stores in different ways, so
    # that one may write what another has not read yet. Programs do not overlap, hence a barrier of
    # this one is enough.
    if IN_PLACE:
        tl.debug_barrier()
    # A pair that is read from neighbours may be written half a head apart, or the other way round:
    # this is all that the two layouts differ in.
    if PAIRS_OUT:
        pairs = tl.reshape(tl.join(p, q), [ROWS, HEADS, 2 * HALF_BLOCK])
        tl.store(to + at_both, pairs, mask=both_here)
    else:
        tl.store(to + at, p, mask=here)
        tl.store(to + at + HALF, q, mask=here)

    if WIDTH > 2 * HALF and not IN_PLACE:
        # Channels before and behind the rotated ones; in place they are there already.
        c = tl.arange(0, WIDTH_BLOCK)
        kept = (c < FIRST) | ((c >= FIRST + 2 * HALF) & (c < WIDTH))
        mask = head_here & kept[None, None, :]
        at_c = c[None, None, :]
        tl.store(to + at_c, tl.load(from_ + at_c, mask=mask), mask=mask)


def rotate(
    x_SBGRd: Tensor,
    y_SBGRd: Tensor,
    freqs_SF: Tensor,
    *,
    mscale: float,
    first: int = 0,
    pairs_in: bool = False,
    pairs_out: bool = False,
    inverse: bool = False,
) -> None:
    """Write the rotation of x to y.

    Args:
        x_SBGRd, y_SBGRd: any strides with contiguous channels. They are the same tensor, whose
            other channels are not touched, or do not overlap.
        freqs_SF: fp32 angles; the first F / 2 columns are read, F channels are rotated.
        first: first rotated channel; the others are copied.
        pairs_in, pairs_out: rotated channels 2i and 2i + 1 form a pair in x, in y; otherwise i and
            i + F / 2.
        inverse: rotate by the negative angle.
    """
    S, B, G, R, d = x_SBGRd.shape
    if not x_SBGRd.numel():
        return
    half = freqs_SF.shape[1] // 2
    in_place = x_SBGRd is y_SBGRd
    width = triton.next_power_of_2(2 * half if in_place else d)
    # Heads first, positions with what is left: sines and cosines are then shared by most.
    heads = min(triton.next_power_of_2(G * R), max(1, _ELEMENTS // width))
    rows = max(1, _ELEMENTS // (heads * width))
    grid = (triton.cdiv(S * B, rows), triton.cdiv(G * R, heads))
    rope_rotate[grid](
        x_SBGRd,
        y_SBGRd,
        freqs_SF,
        mscale,
        S * B,
        B,
        G * R,
        R,
        *x_SBGRd.stride()[:4],
        *y_SBGRd.stride()[:4],
        freqs_SF.stride(0),
        FIRST=first,
        HALF=half,
        WIDTH=d,
        PAIRS_IN=pairs_in,
        PAIRS_OUT=pairs_out,
        INVERSE=inverse,
        IN_PLACE=in_place,
        ROWS=rows,
        HEADS=heads,
        HALF_BLOCK=triton.next_power_of_2(half),
        WIDTH_BLOCK=width,
    )
