"""The largest attention logit of each head on an NVIDIA GPU, in Triton.

A program has a block of queries of one head and iterates over the keys that they see. Between two
products it has one instruction per element, the maximum; masks are computed only in tiles at the
edges, but in all tiles of a narrow window. At least two programs fit on an SM, so that the products
of one overlap the others. Programs of a head combine by an atomic maximum, in any order.

Legend: B batch, H query heads, G key-value heads, S queries, T keys, d channels.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tiles(  # type: ignore[no-untyped-def]
    most,
    q,
    q_rest,
    k,
    k_t,
    begin,
    end,
    T,
    first,
    position,
    D,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """`most`, and the logits of the keys from `begin` to `end`, whole tiles; without the scale."""
    c = tl.arange(0, WIDE)
    for start in range(begin, end, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        rows = k + j.to(tl.int64)[:, None] * k_t
        if MASKED:
            keys = tl.load(rows + c[None, :], mask=(j < T)[:, None] & (c < D)[None, :], other=0.0)
        else:
            keys = tl.load(rows + c[None, :], mask=(c < D)[None, :], other=0.0)
        logits = tl.dot(q, tl.trans(keys), input_precision=EXACT)
        if REST > 0:
            e = WIDE + tl.arange(0, REST)
            here = (j < T)[:, None] & (e < D)[None, :]
            keys = tl.load(rows + e[None, :], mask=here, other=0.0)
            logits = tl.dot(q_rest, tl.trans(keys), logits, input_precision=EXACT)
        if MASKED:
            seen = (j[None, :] >= first[:, None]) & (j[None, :] <= position[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        most = tl.maximum(most, tl.max(logits, 1))
    return most


@triton.jit
def attention_max_logit(  # type: ignore[no-untyped-def]
    most_H,
    due,
    q,
    k,
    first_T,
    lse,
    scale,
    H,
    R,
    S,
    T,
    window,
    q_b,
    q_h,
    q_s,
    k_b,
    k_g,
    k_t,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NARROW: tl.constexpr,
    EXACT: tl.constexpr,
):
    # The last queries see most keys: they start first.
    top_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    end_row = tl.minimum(top_row + ROWS, S)
    s = top_row + tl.arange(0, ROWS)
    h = tl.program_id(1) % H
    b = tl.program_id(1) // H
    go = tl.load(due) != 0
    if lse is not None:
        # A stale value is smaller. The slack exceeds both rounding errors, so that no row that may
        # have the maximum is skipped, whichever program is first. Another program may raise the
        # value while the warps of this one read it. They all take the branch or none does, as its
        # products need all of them: the answer is reduced over the warps after it was compared.
        reached = tl.load(most_H + h)
        at = lse + tl.program_id(1).to(tl.int64) * S + s
        bounds = tl.load(at, mask=s < S, other=float("-inf"))
        may_raise = bounds >= reached - (0.0625 + tl.abs(reached) * 0.0009765625)
        go = go & (tl.max(may_raise.to(tl.int32), 0) != 0)
    if go:
        last = tl.minimum(s, S - 1)  # rows past the end repeat the last one
        position = T - S + last
        # First keys of the block's first and last rows, which never decrease from row to row.
        first = tl.zeros_like(position)
        least = 0
        most_first = 0
        if window > 0:
            first = tl.maximum(first, position - window + 1)
            least = tl.maximum(T - S + top_row - window + 1, 0)
            most_first = tl.maximum(T - S + end_row - window, 0)
        if first_T is not None:
            first = tl.maximum(first, tl.load(first_T + last).to(tl.int32))
            least = tl.maximum(least, tl.load(first_T + top_row).to(tl.int32))
            most_first = tl.maximum(most_first, tl.load(first_T + end_row - 1).to(tl.int32))
        c = tl.arange(0, WIDE)
        row = q + b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + last.to(tl.int64)[:, None] * q_s
        queries = tl.load(row + c[None, :], mask=(c < D)[None, :], other=0.0)
        rest = queries
        if REST > 0:
            e = WIDE + tl.arange(0, REST)
            rest = tl.load(row + e[None, :], mask=(e < D)[None, :], other=0.0)
        keys = k + b.to(tl.int64) * k_b + (h // R).to(tl.int64) * k_g
        # Whole tiles from the first key that any row sees to the last; all rows see all keys of
        # those from `whole` to `part`.
        begin = least // COLUMNS * COLUMNS
        end = T - S + end_row
        part = begin
        most = tl.full([ROWS], float("-inf"), tl.float32)
        if not NARROW:  # else at most one tile needs no mask, and one loop has all of them
            part = tl.maximum((T - S + top_row + 1) // COLUMNS * COLUMNS, begin)
            whole = tl.minimum((most_first + COLUMNS - 1) // COLUMNS * COLUMNS, part)
            most = tiles(
                most, queries, rest, keys, k_t, begin, whole, T, first, position, D,
                True, WIDE, REST, COLUMNS, EXACT,
            )  # fmt: skip
            most = tiles(
                most, queries, rest, keys, k_t, whole, part, T, first, position, D,
                False, WIDE, REST, COLUMNS, EXACT,
            )  # fmt: skip
        most = tiles(
            most, queries, rest, keys, k_t, part, end, T, first, position, D,
            True, WIDE, REST, COLUMNS, EXACT,
        )  # fmt: skip
        tl.atomic_max(most_H + h, tl.max(most, 0) * scale)


class _Tiling(NamedTuple):
    rows: int
    columns: int
    warps: int
    stages: int


def _tiling(d: int, window: int) -> _Tiling:
    if 0 < window <= 128 and d <= 64:
        # A program has a few tiles, and waits for memory most of the time: many of them on an SM
        # hide that better than prefetching, whose buffers would leave room for fewer.
        return _Tiling(64, 64, 4, 1)
    return _Tiling(128, 128 if d <= 128 else 64, 8, 3 if d <= 64 else 2)


def launch(
    most_H: Tensor,
    due: Tensor,
    q_BHSd: Tensor,
    k_BGTd: Tensor,
    first_T: Tensor | None,
    lse_BHS: Tensor | None,
    scale: float,
    window: int,
) -> None:
    """`kernels.core_attention.max_logit.raise_max_logits`, of tensors with contiguous channels."""
    (B, H, S, d), (_, G, T, _) = q_BHSd.shape, k_BGTd.shape
    # 192 channels are 128 and 64: padded to a power of two, a quarter of the products would be 0.
    wide = max(16, 1 << (d.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(d - wide)) if d > wide else 0
    tiling = _tiling(d, window)
    attention_max_logit[(triton.cdiv(S, tiling.rows), B * H)](
        most_H,
        due,
        q_BHSd,
        k_BGTd,
        first_T,
        lse_BHS,
        scale,
        *(H, H // G, S, T, window),
        *q_BHSd.stride()[:3],
        *k_BGTd.stride()[:3],
        D=d,
        WIDE=wide,
        REST=rest,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        NARROW=0 < window <= tiling.rows + tiling.columns,
        EXACT="ieee",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
