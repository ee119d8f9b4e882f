"""`extras.muon.newton_schulz.symmetric` on an NVIDIA GPU, in Triton.

Programs of one matrix follow one another, so that they read it from the L2 cache.
"""

import triton
import triton.language as tl
from torch import Tensor

_TILE, _BLOCK_K, _WARPS, _STAGES = 128, 64, 4, 3
"""Two programs share a multiprocessor, with 96 KiB of operands in flight each: the fastest of seven
on an H100, for matrices of 512 x 1024 and of 1024 x 1024."""


@triton.jit
def symmetric_product(  # type: ignore[no-untyped-def]
    x,
    out,
    scale,
    S,
    K,
    stride_b,
    stride_s,
    stride_k,
    a,
    b,
    c,
    POLYNOMIAL: tl.constexpr,
    SCALED: tl.constexpr,
    EVEN: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Tile t of the lower triangle is in row i, which begins with number i (i + 1) / 2.
    side = tl.cdiv(S, TILE)
    tiles = side * (side + 1) // 2
    t = tl.program_id(0) % tiles
    i = ((tl.sqrt(8.0 * t + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)  # the root is rounded
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    j = t - i * (i + 1) // 2
    matrix = (tl.program_id(0) // tiles).to(tl.int64)
    x += matrix * stride_b
    out += matrix * S * S
    rows = i * TILE + tl.arange(0, TILE)
    columns = j * TILE + tl.arange(0, TILE)
    ks = tl.arange(0, BLOCK_K)
    left = x + rows[:, None] * stride_s + ks[None, :] * stride_k
    right = x + columns[None, :] * stride_s + ks[:, None] * stride_k
    total = tl.zeros((TILE, TILE), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN:
            u, v = tl.load(left), tl.load(right)
        else:
            u = tl.load(left, mask=(rows[:, None] < S) & (k + ks[None, :] < K), other=0.0)
            v = tl.load(right, mask=(columns[None, :] < S) & (k + ks[:, None] < K), other=0.0)
        total = tl.dot(u, v, total)
        left += BLOCK_K * stride_k
        right += BLOCK_K * stride_k
    inside = (rows[:, None] < S) & (columns[None, :] < S)
    if POLYNOMIAL:  # x is the matrix itself
        g = tl.load(x + rows[:, None] * S + columns[None, :], mask=inside, other=0.0)
        s = tl.load(scale + matrix) if SCALED else 1.0
        total = s * (c * (s * total) + b * g.to(tl.float32))
        total += tl.where(rows[:, None] == columns[None, :], a, 0.0)
        if SCALED:
            total *= tl.sqrt(s)
    tile = total.to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * S + columns[None, :], tile, mask=inside)
    if i != j:
        mirrored = (columns[:, None] < S) & (rows[None, :] < S)
        tl.store(out + columns[:, None] * S + rows[None, :], tl.trans(tile), mask=mirrored)


def launch(
    x_BSK: Tensor,
    out_BSS: Tensor,
    abc: tuple[float, float, float] | None = None,
    scale_B: Tensor | None = None,
) -> None:
    """X X^T into `out_BSS`; with `abc`, a I + b X + c X^2 of symmetric matrices X.

    `x_BSK` has any strides, contiguous with `abc`; `out_BSS` is contiguous, of the same dtype.
    `scale_B` are fp32 factors, with `abc`: see `polynomial`.
    """
    B, S, K = x_BSK.shape
    if not x_BSK.numel():
        out_BSS.zero_()
        return
    n = triton.cdiv(S, _TILE)
    symmetric_product[(B * n * (n + 1) // 2,)](
        *(x_BSK, out_BSS, scale_B, S, K, *x_BSK.stride(), *(abc or (0.0, 0.0, 1.0))),
        POLYNOMIAL=abc is not None,
        SCALED=scale_B is not None,
        EVEN=S % _TILE == 0 and K % _BLOCK_K == 0,
        TILE=_TILE,
        BLOCK_K=_BLOCK_K,
        num_warps=_WARPS,
        num_stages=_STAGES,
    )
