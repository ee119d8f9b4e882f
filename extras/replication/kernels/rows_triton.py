"""`extras.replication.kernels.rows` on an NVIDIA GPU, in Triton.

`kernels.sm90.exchange.combine_push` sends the rows.

Legend: T tokens of a rank, K expert ids of a token, R ranks, N = R * T received rows, S expert
rows, D hidden, L own experts of a rank, P expert slots of a rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64
_TOKENS = 8  # tokens per program of the sum: most of them have no unreduced rows
_COLUMNS = 1024


@triton.jit
def split_returns_kernel(  # type: ignore[no-untyped-def]
    idx,
    slots,
    inverse,
    sums,
    pairs,
    count,
    N,
    rank,
    L,
    P,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, SLOTS)
    at = n[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    expert = tl.load(idx + at, mask=inside, other=-1)
    slot = tl.load(slots + at, mask=inside, other=-1)
    row = tl.load(inverse + at, mask=inside, other=-1)
    owned = (expert >= 0) & (expert // L == rank)
    away = owned & (slot // P != rank)
    split = tl.max(away.to(tl.int32), 1) > 0
    unreduced = (row >= 0) & ((owned == 0) | split[:, None])
    tl.store(sums + at, tl.where(unreduced, -1, row), mask=inside)
    ones = tl.reshape(unreduced.to(tl.int32), [ROWS * SLOTS])
    some = tl.sum(ones, 0)
    if some > 0:
        # The order of programs may be any: each row has a position in memory of its own.
        first = tl.atomic_add(count, some)
        to = first + tl.cumsum(ones, 0) - 1
        tl.store(pairs + to, tl.reshape(at, [ROWS * SLOTS]), mask=ones > 0)


@triton.jit
def sum_unreduced_rows_kernel(  # type: ignore[no-untyped-def]
    unreduced_rows,
    idx,
    slots,
    sums,
    T,
    D,
    L,
    P,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    begin = tl.program_id(0) * TOKENS
    n = begin + tl.arange(0, TOKENS)
    k = tl.arange(0, SLOTS)
    inside = (n < T)[:, None] & (k < K)[None, :]
    experts = tl.load(idx + n[:, None] * K + k[None, :], mask=inside, other=-1)
    ranks = tl.load(slots + n[:, None] * K + k[None, :], mask=inside, other=-1) // P
    some = tl.max(tl.max(((experts >= 0) & (ranks != experts // L)).to(tl.int32), 1), 0)
    if some > 0:
        for t in range(begin, tl.minimum(begin + TOKENS, T)):
            _sum_token(unreduced_rows, idx, slots, sums, t, T, D, L, P, K, SLOTS, COLUMNS)


@triton.jit
def _sum_token(  # type: ignore[no-untyped-def]
    unreduced_rows,
    idx,
    slots,
    sums,
    t,
    T,
    D,
    L,
    P,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    k = tl.arange(0, SLOTS)
    expert = tl.load(idx + t * K + k, mask=k < K, other=-1)
    slot = tl.load(slots + t * K + k, mask=k < K, other=-1)
    owner = tl.where(expert >= 0, expert // L, -1)
    away = (expert >= 0) & (slot // P != owner)
    if tl.max(away.to(tl.int32), 0) > 0:
        for j in range(K):
            rank = tl.sum(tl.where(k == j, owner, 0), 0)
            of_rank = (owner == rank) & (expert >= 0)
            split = tl.max((of_rank & away).to(tl.int32), 0)
            earlier = tl.max((of_rank & (k < j)).to(tl.int32), 0)
            if (rank >= 0) & (split > 0) & (earlier == 0):
                for first in range(0, D, COLUMNS):
                    column = first + tl.arange(0, COLUMNS)
                    inside = column < D
                    total = tl.zeros([COLUMNS], tl.float32)
                    for i in range(j, K):
                        wanted = tl.max((of_rank & (k == i)).to(tl.int32), 0) > 0
                        row = unreduced_rows + (i * T + t).to(tl.int64) * D
                        x = tl.load(row + column, mask=inside & wanted, other=0.0)
                        total += x.to(tl.float32)
                    to = sums + (rank * T + t).to(tl.int64) * D
                    tl.store(to + column, total.to(sums.dtype.element_ty), mask=inside)


def split_returns(
    idx_NK: Tensor, slot_NK: Tensor, inverse_NK: Tensor, rows: int, owner: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rows.split_returns`."""
    N, K = idx_NK.shape
    sums_NK, pairs_S = torch.empty_like(inverse_NK), inverse_NK.new_empty(rows)
    count = inverse_NK.new_zeros(1)
    if N:
        split_returns_kernel[(triton.cdiv(N, _ROWS),)](
            *(idx_NK, slot_NK, inverse_NK, sums_NK, pairs_S, count),
            *(N, *owner),
            K=K,
            SLOTS=triton.next_power_of_2(K),
            ROWS=_ROWS,
        )
    return sums_NK, pairs_S, count, inverse_NK


def sum_unreduced_rows(
    unreduced_KTD: Tensor, idx_TK: Tensor, slot_TK: Tensor, sums_ND: Tensor, owner: Any
) -> None:
    """`rows.sum_unreduced_rows`."""
    K, T, D = unreduced_KTD.shape
    if T:
        sum_unreduced_rows_kernel[(triton.cdiv(T, _TOKENS),)](
            *(unreduced_KTD, idx_TK, slot_TK, sums_ND),
            *(T, D, owner.local, owner.local_slots),
            K=K,
            SLOTS=triton.next_power_of_2(K),
            TOKENS=_TOKENS,
            COLUMNS=_COLUMNS,
        )
