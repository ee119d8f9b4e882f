"""Queries, keys and values from a fused projection, and their gradients into it, in Triton.

A program has some consecutive heads of the projection, of any kind, for a few positions: each is
read and written through a pointer of its own. Backward it iterates over several blocks of positions
and sums the gradients of bias and weights in registers; `part_sum` sums the programs in order.

Legend: S positions, B batch, G groups, N heads of a group, R = N - 2 of them queries, d channels, M
= G * N, P programs along positions, C programs along heads.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.core_attention.rope_triton import cos_sin, rotated
from phalanx.kernels.elementwise.sums_triton import part_sum

_ELEMENTS = 2048  # channels that a program processes at a time
_HEADS = 8  # most heads of a program
_PROGRAMS = 528
"""Most programs of the backward pass, on every GPU: 4 for each of a Hopper GPU's 132 SMs, which run
all of them at once."""
_STAGES = 3  # blocks of positions that a program of the backward pass has in flight

Three = tuple[Tensor, Tensor, Tensor]


@triton.jit
def qkv_part(  # type: ignore[no-untyped-def]
    qkv,
    bias,
    query_weight,
    key_weight,
    freqs,
    q,
    k,
    v,
    eps,
    mscale,
    rows,
    B,
    G,
    N,
    x_s,
    x_b,
    x_g,
    x_n,
    f_s,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    VALUES: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    # A program has ROWS positions, of S and B flattened, and HEADS of the G * N heads, whose
    # channels are two halves, x and y: a channel is rotated with the one half a head further. Each
    # element is read and written by one program: none waits for another.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # 64 bits for offsets: a projection may have more than 2^31 elements.
    s = (row // B).to(tl.int64)
    position = row % B
    row = row.to(tl.int64)
    m = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    g = m // N
    n = m % N
    # Heads of a group are its queries, its key, its value. A program may have all three kinds: they
    # differ in pointers, and by a select at the end.
    is_key = n == N - 2
    is_value = n == N - 1
    i = tl.arange(0, HALF_BLOCK)
    wanted = m < G * N
    # Values that are a view of the projection are where they belong.
    if not VALUES:
        wanted = wanted & (n != N - 1)
    known = (i < HALF)[None, :]
    here = ((row < rows)[:, None] & wanted[None, :])[:, :, None] & known[None, :, :]

    from_ = qkv + ((s * x_s + position * x_b)[:, None] + (g * x_g + n * x_n)[None, :])
    at = from_[:, :, None] + i[None, None, :]
    x = tl.load(at, mask=here, other=0.0).to(tl.float32)
    y = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
    # Before norm and rotation, as a projection adds it, but in fp32.
    if BIASED:
        of_head = (m * (2 * HALF))[:, None] + i[None, :]
        bias_here = wanted[:, None] & known
        x += tl.load(bias + of_head, mask=bias_here, other=0.0).to(tl.float32)[None, :, :]
        y += tl.load(bias + of_head + HALF, mask=bias_here, other=0.0).to(tl.float32)[None, :, :]
    # Both halves of a head have the same angles: the first half's are read.
    angle = tl.load(
        freqs + s[:, None] * f_s + i[None, :], mask=(row < rows)[:, None] & known, other=0.0
    )
    cos, sin = cos_sin(angle)
    # Sine and cosine carry the factor, so that values, which are not rotated, have none.
    cos = (cos * mscale)[:, None, :]
    sin = (sin * mscale)[:, None, :]
    # x and y stay as they are for the values.
    a = x
    b = y
    if NORMED:
        rstd = head_rstd(x, y, eps, HALF)
        weight_a, weight_b = head_weights(query_weight, key_weight, is_key, i, HALF)
        a = x * rstd * weight_a
        b = y * rstd * weight_b
    a, b = rotated(a, b, cos, sin)
    if VALUES:
        a = tl.where(is_value[None, :, None], x, a)
        b = tl.where(is_value[None, :, None], y, b)

    # Pointers of one type, since all results have the projection's dtype. [S, B, heads, d] is
    # contiguous, and `row` is S and B flattened.
    to = tl.where(
        is_key[None, :],
        k + (row[:, None] * G + g[None, :]) * (2 * HALF),
        q + (row[:, None] * (G * (N - 2)) + (g * (N - 2) + n)[None, :]) * (2 * HALF),
    )
    if VALUES:
        to = tl.where(is_value[None, :], v + (row[:, None] * G + g[None, :]) * (2 * HALF), to)
    out = to[:, :, None] + i[None, None, :]
    tl.store(out, a.to(q.dtype.element_ty), mask=here)
    tl.store(out + HALF, b.to(q.dtype.element_ty), mask=here)


@triton.jit
def head_rstd(x, y, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """1 / sqrt(mean square + eps) of heads in two halves, [ROWS, HEADS, 1]."""
    return tl.rsqrt(tl.sum(x * x + y * y, 2) / (2 * HALF) + eps)[:, :, None]


@triton.jit
def head_weights(query_weight, key_weight, is_key, i, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Both halves of each head's weight, [1, HEADS, HALF]."""
    qa = tl.load(query_weight + i, mask=i < HALF, other=0.0).to(tl.float32)
    qb = tl.load(query_weight + i + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    ka = tl.load(key_weight + i, mask=i < HALF, other=0.0).to(tl.float32)
    kb = tl.load(key_weight + i + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    is_key = is_key[None, :, None]
    a = tl.where(is_key, ka[None, None, :], qa[None, None, :])
    return a, tl.where(is_key, kb[None, None, :], qb[None, None, :])


@triton.jit
def qkv_join(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    qkv,
    bias,
    query_weight,
    key_weight,
    freqs,
    dqkv,
    weight_parts,
    bias_parts,
    eps,
    mscale,
    rows,
    B,
    G,
    N,
    dq_s,
    dq_b,
    dq_h,
    dk_s,
    dk_b,
    dk_h,
    dv_s,
    dv_b,
    dv_h,
    x_s,
    x_b,
    x_g,
    x_n,
    f_s,
    SHIFTED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    HALF: tl.constexpr,
    TURNS: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    # A program has HEADS heads, and TURNS blocks of ROWS positions one after the other. Weights and
    # bias of its heads are read once, and their gradients leave once, as a row of parts of its own:
    # no atomics, so that the order of sums depends only on shapes.
    m = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    g = m // N
    n = m % N
    is_key = n == N - 2
    is_value = n == N - 1
    wanted = m < G * N
    i = tl.arange(0, HALF_BLOCK)
    known = (i < HALF)[None, :]
    of_head = (m * (2 * HALF))[:, None] + i[None, :]
    head_here = wanted[:, None] & known
    if NORMED:
        weight_a, weight_b = head_weights(query_weight, key_weight, is_key, i, HALF)
    if SHIFTED:
        shift_a = tl.load(bias + of_head, mask=head_here, other=0.0).to(tl.float32)
        shift_b = tl.load(bias + of_head + HALF, mask=head_here, other=0.0).to(tl.float32)
    # Each row of a block has sums of its own, which are added behind the loop: a turn needs no
    # reduction over rows.
    of_weight_a = tl.zeros([ROWS, HEADS, HALF_BLOCK], tl.float32)
    of_weight_b = tl.zeros([ROWS, HEADS, HALF_BLOCK], tl.float32)
    of_bias_a = tl.zeros([ROWS, HEADS, HALF_BLOCK], tl.float32)
    of_bias_b = tl.zeros([ROWS, HEADS, HALF_BLOCK], tl.float32)
    # Loads of the next blocks are in flight while one is computed.
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        row = (tl.program_id(0) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        s = (row // B).to(tl.int64)
        b = row % B
        row = row.to(tl.int64)
        here = ((row < rows)[:, None] & wanted[None, :])[:, :, None] & known[None, :, :]
        # Gradients have the strides in which the core attention left them.
        from_ = tl.where(
            is_key[None, :],
            dk + ((s * dk_s + b * dk_b)[:, None] + (g * dk_h)[None, :]),
            dq + ((s * dq_s + b * dq_b)[:, None] + ((g * (N - 2) + n) * dq_h)[None, :]),
        )
        from_ = tl.where(
            is_value[None, :], dv + ((s * dv_s + b * dv_b)[:, None] + (g * dv_h)[None, :]), from_
        )
        at = from_[:, :, None] + i[None, None, :]
        value_u = tl.load(at, mask=here, other=0.0).to(tl.float32)
        value_v = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
        angle = tl.load(
            freqs + s[:, None] * f_s + i[None, :], mask=(row < rows)[:, None] & known, other=0.0
        )
        cos, sin = cos_sin(angle)
        cos = (cos * mscale)[:, None, :]
        sin = (sin * mscale)[:, None, :]
        # The gradient of a rotation is the rotation back, with the same factor mscale. Values keep
        # what was loaded.
        u, v = rotated(value_u, value_v, cos, -sin)
        if NORMED:
            x_at = qkv + ((s * x_s + b * x_b)[:, None] + (g * x_g + n * x_n)[None, :])
            # x and y of values and of rows past the end are 0, so that these add nothing to sums.
            turned = here & (n < N - 1)[None, :, None]
            x_at = x_at[:, :, None] + i[None, None, :]
            x = tl.load(x_at, mask=turned, other=0.0).to(tl.float32)
            y = tl.load(x_at + HALF, mask=turned, other=0.0).to(tl.float32)
            if SHIFTED:
                # What the norm saw: the projection with its bias.
                x = tl.where(turned, x + shift_a[None, :, :], 0.0)
                y = tl.where(turned, y + shift_b[None, :, :], 0.0)
            rstd = head_rstd(x, y, eps, HALF)
            x = x * rstd
            y = y * rstd
            # x and y are normalised here, u and v still the gradients of the norm's result.
            of_weight_a += u * x
            of_weight_b += v * y
            u = u * weight_a
            v = v * weight_b
            # Through the norm: the part of the gradient along x changes only its length, which the
            # norm takes out.
            mean = (tl.sum(u * x + v * y, 2) / (2 * HALF))[:, :, None]
            u = rstd * (u - x * mean)
            v = rstd * (v - y * mean)
        u = tl.where(is_value[None, :, None], value_u, u)
        v = tl.where(is_value[None, :, None], value_v, v)
        # Of the head before norm and rotation, and of values as they are.
        if BIASED:
            of_bias_a += u
            of_bias_b += v
        to = dqkv + (row[:, None] * (G * N) + m[None, :]) * (2 * HALF)
        out = to[:, :, None] + i[None, None, :]
        tl.store(out, u.to(dqkv.dtype.element_ty), mask=here)
        tl.store(out + HALF, v.to(dqkv.dtype.element_ty), mask=here)

    if NORMED:
        # Programs along heads share the weights: every program has a row, queries' and keys' sums
        # in it. Values count 0 among the queries.
        program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        to = weight_parts + program.to(tl.int64) * (4 * HALF) + i
        for_keys = is_key[:, None]
        a = tl.sum(of_weight_a, 0)
        b = tl.sum(of_weight_b, 0)
        tl.store(to, tl.sum(tl.where(for_keys, 0.0, a), 0), mask=i < HALF)
        tl.store(to + HALF, tl.sum(tl.where(for_keys, 0.0, b), 0), mask=i < HALF)
        tl.store(to + 2 * HALF, tl.sum(tl.where(for_keys, a, 0.0), 0), mask=i < HALF)
        tl.store(to + 3 * HALF, tl.sum(tl.where(for_keys, b, 0.0), 0), mask=i < HALF)
    if BIASED:
        # Programs along heads have columns of their own, so a row for each one along positions.
        to = bias_parts + tl.program_id(0).to(tl.int64) * (G * N * 2 * HALF) + of_head
        tl.store(to, tl.sum(of_bias_a, 0), mask=head_here)
        tl.store(to + HALF, tl.sum(of_bias_b, 0), mask=head_here)


def part(
    qkv_SBGNd: Tensor,
    outs: tuple[Tensor, Tensor, Tensor | None],
    freqs_SF: Tensor,
    *,
    bias_GNd: Tensor | None,
    weights: tuple[Tensor | None, Tensor | None],
    eps: float,
    mscale: float,
) -> None:
    """Write queries, keys and values, contiguous; see `kernels.core_attention.qkv`.

    Without the last of `outs` values are not written. Of the fp32 angles the first F / 2 = d / 2
    columns are read. `weights`: those of the norms of queries and keys, both or neither.
    """
    S, B, G, N, d = qkv_SBGNd.shape
    if not qkv_SBGNd.numel():
        return
    q_SBHd, k_SBGd, v_SBGd = outs
    rows, heads, half_block = _blocks(G * N, d)
    qkv_part[(triton.cdiv(S * B, rows), triton.cdiv(G * N, heads))](
        qkv_SBGNd,
        bias_GNd,
        *weights,
        freqs_SF,
        q_SBHd,
        k_SBGd,
        v_SBGd,
        eps,
        mscale,
        S * B,
        *(B, G, N),
        *qkv_SBGNd.stride()[:4],
        freqs_SF.stride(0),
        BIASED=bias_GNd is not None,
        NORMED=weights[0] is not None,
        VALUES=v_SBGd is not None,
        HALF=d // 2,
        ROWS=rows,
        HEADS=heads,
        HALF_BLOCK=half_block,
    )


def join(
    gradients: Three,
    dqkv_SBGNd: Tensor,
    freqs_SF: Tensor,
    *,
    qkv_SBGNd: Tensor | None,
    bias_GNd: Tensor | None,
    bias_dtype: torch.dtype | None,
    weights: tuple[Tensor | None, Tensor | None],
    eps: float,
    mscale: float,
) -> tuple[Tensor | None, Tensor | None]:
    """Write the gradient of the projection, contiguous, from those of `part`'s results.

    It returns gradients of the bias, [G, N, d], and of both norms' weights, [2, d]; None if absent.
    `qkv_SBGNd` and `bias_GNd` are given only with norms, `bias_dtype` with a bias.
    """
    S, B, G, N, d = dqkv_SBGNd.shape
    normed, biased = weights[0] is not None, bias_dtype is not None
    rows, heads, half_block = _blocks(G * N, d)
    along = triton.cdiv(G * N, heads)
    # As many blocks a program as keep the grid at _PROGRAMS: parts are few, whatever S is.
    turns = max(1, triton.cdiv(triton.cdiv(S * B, rows), max(1, _PROGRAMS // along)))
    programs = triton.cdiv(triton.cdiv(S * B, rows), turns), along
    fp32: dict[str, Any] = dict(dtype=torch.float32, device=dqkv_SBGNd.device)
    weight_parts = torch.empty(programs[0] * programs[1], 2, d, **fp32) if normed else None
    bias_parts = torch.empty(programs[0], G, N, d, **fp32) if biased else None
    if dqkv_SBGNd.numel():
        qkv_join[programs](
            *gradients,
            qkv_SBGNd,
            bias_GNd,
            *weights,
            freqs_SF,
            dqkv_SBGNd,
            weight_parts,
            bias_parts,
            eps,
            mscale,
            S * B,
            *(B, G, N),
            *(stride for x in gradients for stride in x.stride()[:3]),
            *((0,) * 4 if qkv_SBGNd is None else qkv_SBGNd.stride()[:4]),
            freqs_SF.stride(0),
            SHIFTED=bias_GNd is not None,
            BIASED=biased,
            NORMED=normed,
            HALF=d // 2,
            TURNS=turns,
            STAGES=_STAGES,
            ROWS=rows,
            HEADS=heads,
            HALF_BLOCK=half_block,
        )
    return (
        None if bias_parts is None else part_sum(bias_parts, bias_dtype),
        None if weight_parts is None else part_sum(weight_parts, weights[0].dtype),  # type: ignore[union-attr]
    )


def _blocks(M: int, d: int) -> tuple[int, int, int]:
    """Positions, heads and pairs of channels that a program has at a time, powers of two."""
    half_block = triton.next_power_of_2(d // 2)
    # M & -M is the largest power of two that divides M: no program has a head too many.
    heads = min(M & -M, _HEADS, max(1, _ELEMENTS // (2 * half_block)))
    return max(1, _ELEMENTS // (heads * 2 * half_block)), heads, half_block
