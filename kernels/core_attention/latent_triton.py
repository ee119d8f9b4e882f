"""Keys and values of latent attention joined, and their gradients split, in Triton.

A program has the heads of a few positions, so that their shared part is read and rotated once for
many of them; backward it iterates over all heads and sums in a fixed order, without atomics.

Legend: S positions, B batch, H heads, n channels of a key's part per head, F shared and rotated, d
= n + F, v channels of a value, m = n + v.
"""

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.core_attention.rope_triton import cos_sin, rotated_to

_ELEMENTS = 4096  # channels of the parts per head that a program processes at a time


@triton.jit
def cos_sin_of(freqs, s, i, f_s, mscale, known):  # type: ignore[no-untyped-def]
    """Cosine and sine, times mscale, of angles `i` of positions `s`: [ROWS, HALF_BLOCK]."""
    angle = tl.load(freqs + s[:, None] * f_s + i[None, :], mask=known, other=0.0)
    cos, sin = cos_sin(angle)
    return cos * mscale, sin * mscale


@triton.jit
def mla_join_keys(  # type: ignore[no-untyped-def]
    kv,
    shared,
    freqs,
    k,
    value,
    mscale,
    rows,
    B,
    H,
    kv_s,
    kv_b,
    kv_h,
    shared_s,
    shared_b,
    f_s,
    k_s,
    k_b,
    k_h,
    value_s,
    value_b,
    value_h,
    OWN: tl.constexpr,
    HALF: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    OWN_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    # A program has ROWS positions, of S and B flattened, and HEADS heads. A head's key is OWN
    # channels of its own, then the shared part, which is rotated once for these heads; its value
    # follows the own channels in `kv`. Programs share nothing.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s = row // B
    b = row % B
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    from_ = kv + ((s * kv_s + b * kv_b)[:, None] + (h * kv_h)[None, :])[:, :, None]
    to = k + ((s * k_s + b * k_b)[:, None] + (h * k_h)[None, :])[:, :, None]
    head_here = ((row < rows)[:, None] & (h < H)[None, :])[:, :, None]

    i = tl.arange(0, HALF_BLOCK)
    # A mask of pairs; below there is one of both channels of each.
    known = (row < rows)[:, None] & (i < HALF)[None, :]
    cos, sin = cos_sin_of(freqs, s, i, f_s, mscale, known)
    j = tl.arange(0, 2 * HALF_BLOCK)
    both_here = (row < rows)[:, None] & (j < 2 * HALF)[None, :]
    at_both = (s * shared_s + b * shared_b)[:, None] + j[None, :]
    # Neighbours form a pair, read by wide accesses and split in registers; keys have them HALF
    # apart.
    pairs = tl.load(shared + at_both, mask=both_here, other=0.0)
    u, v = tl.split(tl.reshape(pairs, [ROWS, HALF_BLOCK, 2]))
    p, q = rotated_to(u, v, cos, sin, k.dtype.element_ty)
    at = (OWN + i)[None, None, :]
    here = head_here & (i < HALF)[None, None, :]
    # The same for every head: attention takes keys of whole heads.
    tl.store(to + at, tl.broadcast_to(p[:, None, :], [ROWS, HEADS, HALF_BLOCK]), mask=here)
    tl.store(to + at + HALF, tl.broadcast_to(q[:, None, :], [ROWS, HEADS, HALF_BLOCK]), mask=here)

    # What is not rotated is copied in the same pass, so that `kv` is read once.
    c = tl.arange(0, OWN_BLOCK)[None, None, :]
    own_here = head_here & (c < OWN)
    tl.store(to + c, tl.load(from_ + c, mask=own_here), mask=own_here)

    e = tl.arange(0, VALUE_BLOCK)[None, None, :]
    value_here = head_here & (e < VALUE)
    to_value = value + ((s * value_s + b * value_b)[:, None] + (h * value_h)[None, :])[:, :, None]
    tl.store(to_value + e, tl.load(from_ + OWN + e, mask=value_here), mask=value_here)


@triton.jit
def mla_split_key_gradient(  # type: ignore[no-untyped-def]
    dk,
    dv,
    freqs,
    dkv,
    dshared,
    mscale,
    rows,
    B,
    H,
    dk_s,
    dk_b,
    dk_h,
    dv_s,
    dv_b,
    dv_h,
    f_s,
    dkv_s,
    dkv_b,
    dkv_h,
    dshared_s,
    dshared_b,
    OWN: tl.constexpr,
    HALF: tl.constexpr,
    VALUE: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    OWN_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    # A program has ROWS positions and all heads, HEADS in a turn: sums over heads stay in its
    # registers, in one order. A grid along heads would need atomics, or parts and another kernel.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    s = row // B
    b = row % B
    i = tl.arange(0, HALF_BLOCK)
    c = tl.arange(0, OWN_BLOCK)[None, None, :]
    e = tl.arange(0, VALUE_BLOCK)[None, None, :]
    at = (OWN + i)[None, None, :]
    # The halves of the shared part's gradient in the order of keys: pairs are HALF apart.
    u = tl.zeros([ROWS, HALF_BLOCK], tl.float32)
    v = tl.zeros([ROWS, HALF_BLOCK], tl.float32)
    for turn in range(TURNS):
        h = turn * HEADS + tl.arange(0, HEADS)
        head_here = ((row < rows)[:, None] & (h < H)[None, :])[:, :, None]
        from_k = dk + ((s * dk_s + b * dk_b)[:, None] + (h * dk_h)[None, :])[:, :, None]
        from_v = dv + ((s * dv_s + b * dv_b)[:, None] + (h * dv_h)[None, :])[:, :, None]
        to = dkv + ((s * dkv_s + b * dkv_b)[:, None] + (h * dkv_h)[None, :])[:, :, None]
        here = head_here & (i < HALF)[None, None, :]
        # In fp32, before the rotation: rotating is linear, so that once behind the sum is enough.
        # Heads past the last one add 0.
        u += tl.sum(tl.load(from_k + at, mask=here, other=0.0).to(tl.float32), 1)
        v += tl.sum(tl.load(from_k + at + HALF, mask=here, other=0.0).to(tl.float32), 1)
        own_here = head_here & (c < OWN)
        tl.store(to + c, tl.load(from_k + c, mask=own_here), mask=own_here)
        value_here = head_here & (e < VALUE)
        tl.store(to + OWN + e, tl.load(from_v + e, mask=value_here), mask=value_here)

    known = (row < rows)[:, None] & (i < HALF)[None, :]
    cos, sin = cos_sin_of(freqs, s, i, f_s, mscale, known)
    # Back, as the gradient of a rotation is its inverse; then neighbours are pairs again.
    p, q = rotated_to(u, v, cos, -sin, dshared.dtype.element_ty)
    j = tl.arange(0, 2 * HALF_BLOCK)
    both_here = (row < rows)[:, None] & (j < 2 * HALF)[None, :]
    at_both = (s * dshared_s + b * dshared_b)[:, None] + j[None, :]
    pairs = tl.reshape(tl.join(p, q), [ROWS, 2 * HALF_BLOCK])
    tl.store(dshared + at_both, pairs, mask=both_here)


def join(
    kv_SBHm: Tensor,
    shared_SBF: Tensor,
    freqs_SF: Tensor,
    k_SBHd: Tensor,
    v_SBHv: Tensor,
    *,
    mscale: float,
) -> None:
    """Write keys and values, which do not overlap kv and the shared part.

    All have any strides with contiguous channels; of the fp32 angles the first F / 2 columns are
    read.
    """
    S, B, H, d = k_SBHd.shape
    if not k_SBHd.numel():
        return
    half, value = shared_SBF.shape[-1] // 2, v_SBHv.shape[-1]
    own = d - 2 * half
    block, heads, rows = _blocks(H, own)
    mla_join_keys[(triton.cdiv(S * B, rows), triton.cdiv(H, heads))](
        kv_SBHm,
        shared_SBF,
        freqs_SF,
        k_SBHd,
        v_SBHv,
        mscale,
        S * B,
        B,
        H,
        *kv_SBHm.stride()[:3],
        *shared_SBF.stride()[:2],
        freqs_SF.stride(0),
        *k_SBHd.stride()[:3],
        *v_SBHv.stride()[:3],
        OWN=own,
        HALF=half,
        VALUE=value,
        ROWS=rows,
        HEADS=heads,
        OWN_BLOCK=block,
        HALF_BLOCK=triton.next_power_of_2(half),
        VALUE_BLOCK=triton.next_power_of_2(value),
    )


def part(
    dk_SBHd: Tensor,
    dv_SBHv: Tensor,
    freqs_SF: Tensor,
    dkv_SBHm: Tensor,
    dshared_SBF: Tensor,
    *,
    mscale: float,
) -> None:
    """Write the gradients of `join`'s inputs, which do not overlap those of its results."""
    S, B, H, _ = dk_SBHd.shape
    if not dshared_SBF.numel():
        return
    half, value = dshared_SBF.shape[-1] // 2, dv_SBHv.shape[-1]
    own = dkv_SBHm.shape[-1] - value
    block, heads, rows = _blocks(H, own)
    mla_split_key_gradient[(triton.cdiv(S * B, rows),)](
        dk_SBHd,
        dv_SBHv,
        freqs_SF,
        dkv_SBHm,
        dshared_SBF,
        mscale,
        S * B,
        B,
        H,
        *dk_SBHd.stride()[:3],
        *dv_SBHv.stride()[:3],
        freqs_SF.stride(0),
        *dkv_SBHm.stride()[:3],
        *dshared_SBF.stride()[:2],
        OWN=own,
        HALF=half,
        VALUE=value,
        TURNS=triton.cdiv(H, heads),
        ROWS=rows,
        HEADS=heads,
        OWN_BLOCK=block,
        HALF_BLOCK=triton.next_power_of_2(half),
        VALUE_BLOCK=triton.next_power_of_2(value),
    )


def _blocks(H: int, own: int) -> tuple[int, int, int]:
    """Channels, heads and positions that a program processes at a time, powers of two."""
    block = triton.next_power_of_2(own)
    # Heads first, positions with what is left: the shared part is then rotated for most of them.
    heads = min(triton.next_power_of_2(H), max(1, _ELEMENTS // block))
    return block, heads, max(1, _ELEMENTS // (heads * block))
