"""Rotation of pairs of channels by given cosines and sines, on an NVIDIA GPU, in Triton.

Each channel is read and written once, the products are fp32 and rounded once.

Legend: B batch, H heads, S positions, d channels, P rotated pairs, F columns of cosines.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 4096  # channels per program


@triton.jit
def rotate_pairs(  # type: ignore[no-untyped-def]
    x,
    y,
    cos,
    sin,
    S,
    H,
    x_b,
    x_h,
    x_s,
    y_b,
    y_h,
    y_s,
    c_b,
    c_s,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    # A program has HEADS heads of one position, which share cosines and sines.
    row = tl.program_id(0).to(tl.int64)
    b = row // S
    s = row % S
    h = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    i = tl.arange(0, PAIRS_BLOCK)[None, :]
    here = (h < H) & (i < PAIRS)
    angle = b * c_b + s * c_s + i
    c = tl.load(cos + angle, mask=i < PAIRS, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=i < PAIRS, other=0.0).to(tl.float32)
    if INVERSE:  # the gradient's rotation
        sine = -sine
    from_ = x + b * x_b + s * x_s + h * x_h
    to = y + b * y_b + s * y_s + h * y_h
    # Pairs of x that are neighbours are half a width apart in y; the gradient goes back.
    if NEIGHBOURS and not INVERSE:
        u = tl.load(from_ + 2 * i, mask=here, other=0.0).to(tl.float32)
        v = tl.load(from_ + 2 * i + 1, mask=here, other=0.0).to(tl.float32)
    else:
        u = tl.load(from_ + i, mask=here, other=0.0).to(tl.float32)
        v = tl.load(from_ + i + PAIRS, mask=here, other=0.0).to(tl.float32)
    p = (u * c - v * sine).to(y.dtype.element_ty)
    q = (v * c + u * sine).to(y.dtype.element_ty)
    if NEIGHBOURS and INVERSE:
        tl.store(to + 2 * i, p, mask=here)
        tl.store(to + 2 * i + 1, q, mask=here)
    else:
        tl.store(to + i, p, mask=here)
        tl.store(to + i + PAIRS, q, mask=here)
    if WIDTH > 2 * PAIRS:
        r = 2 * PAIRS + tl.arange(0, REST_BLOCK)[None, :]
        rest = (h < H) & (r < WIDTH)
        tl.store(to + r, tl.load(from_ + r, mask=rest), mask=rest)


def rotate(
    x_BHSd: Tensor,
    cos_BSF: Tensor,
    sin_BSF: Tensor,
    *,
    pairs: int,
    neighbours: bool,
    inverse: bool,
) -> Tensor:
    """The first 2P channels rotated, the others copied, in the order of the axes of x in memory.

    Args:
        x_BHSd: any strides with contiguous channels.
        cos_BSF, sin_BSF: contiguous columns, of which the first P are read; B may be 1.
        pairs: P.
        neighbours: pairs of x are channels 2i and 2i + 1, those of the result i and i + P.
        inverse: rotate by the negative angle, which is the gradient, from such a result to x.
    """
    B, H, S, d = x_BHSd.shape
    y_BHSd = torch.empty_like(x_BHSd)
    if y_BHSd.stride(-1) != 1:  # the input was expanded
        y_BHSd = torch.empty(x_BHSd.shape, dtype=x_BHSd.dtype, device=x_BHSd.device)
    if not x_BHSd.numel():
        return y_BHSd
    block = triton.next_power_of_2(pairs)
    heads = min(triton.next_power_of_2(H), max(1, _ELEMENTS // (2 * block)))
    c_b = 0 if cos_BSF.shape[0] == 1 else cos_BSF.stride(0)
    rotate_pairs[(B * S, triton.cdiv(H, heads))](
        x_BHSd,
        y_BHSd,
        cos_BSF,
        sin_BSF,
        S,
        H,
        *x_BHSd.stride()[:3],
        *y_BHSd.stride()[:3],
        c_b,
        cos_BSF.stride(1),
        PAIRS=pairs,
        WIDTH=d,
        NEIGHBOURS=neighbours,
        INVERSE=inverse,
        HEADS=heads,
        PAIRS_BLOCK=block,
        REST_BLOCK=triton.next_power_of_2(max(1, d - 2 * pairs)),
    )
    return y_BHSd
