"""`kernels.replication.rows` on an NVIDIA GPU, in Triton; what is sent is a matter of
`kernels.sm90.exchange.combine_push`.

Legend: T tokens of a rank, K slots of a token, R ranks, N = R * T received rows, S expert rows, D
hidden, L own experts of a rank, P places of a rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.replication.rows import ExpertOwner, ReturnPlan

_ROWS = 64
_TOKENS = 8
"""Of a program that adds rows up: most have none that do."""
_COLUMNS = 1024


@triton.jit
def split_returns_kernel(  # type: ignore[no-untyped-def]
    idx,
    places,
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
    place = tl.load(places + at, mask=inside, other=-1)
    row = tl.load(inverse + at, mask=inside, other=-1)
    mine = (expert >= 0) & (expert // L == rank)
    away = mine & (place // P != rank)
    parted = tl.max(away.to(tl.int32), 1) > 0
    single = (row >= 0) & ((mine == 0) | parted[:, None])
    tl.store(sums + at, tl.where(single, -1, row), mask=inside)
    ones = tl.reshape(single.to(tl.int32), [ROWS * SLOTS])
    some = tl.sum(ones, 0)
    if some > 0:
        # The order of programs may be any: rows go to places of their own.
        first = tl.atomic_add(count, some)
        to = first + tl.cumsum(ones, 0) - 1
        tl.store(pairs + to, tl.reshape(at, [ROWS * SLOTS]), mask=ones > 0)


@triton.jit
def sum_unreduced_rows_kernel(  # type: ignore[no-untyped-def]
    unreduced_rows,
    idx,
    places,
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
    ranks = tl.load(places + n[:, None] * K + k[None, :], mask=inside, other=-1) // P
    some = tl.max(tl.max(((experts >= 0) & (ranks != experts // L)).to(tl.int32), 1), 0)
    if some > 0:
        for t in range(begin, tl.minimum(begin + TOKENS, T)):
            _sum_singles(unreduced_rows, idx, places, sums, t, T, D, L, P, K, SLOTS, COLUMNS)


@triton.jit
def _sum_singles(  # type: ignore[no-untyped-def]
    unreduced_rows,
    idx,
    places,
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
    place = tl.load(places + t * K + k, mask=k < K, other=-1)
    home = tl.where(expert >= 0, expert // L, -1)
    away = (expert >= 0) & (place // P != home)
    if tl.max(away.to(tl.int32), 0) > 0:
        for j in range(K):
            rank = tl.sum(tl.where(k == j, home, 0), 0)
            of = (home == rank) & (expert >= 0)
            parted = tl.max((of & away).to(tl.int32), 0)
            earlier = tl.max((of & (k < j)).to(tl.int32), 0)
            if (rank >= 0) & (parted > 0) & (earlier == 0):
                for first in range(0, D, COLUMNS):
                    column = first + tl.arange(0, COLUMNS)
                    inside = column < D
                    total = tl.zeros([COLUMNS], tl.float32)
                    for i in range(j, K):
                        wanted = tl.max((of & (k == i)).to(tl.int32), 0) > 0
                        row = unreduced_rows + (i * T + t).to(tl.int64) * D
                        x = tl.load(row + column, mask=inside & wanted, other=0.0)
                        total += x.to(tl.float32)
                    to = sums + (rank * T + t).to(tl.int64) * D
                    tl.store(to + column, total.to(sums.dtype.element_ty), mask=inside)


def split_returns(
    idx_NK: Tensor, slot_NK: Tensor, inverse_NK: Tensor, rows: int, home: ExpertOwner
) -> ReturnPlan:
    """`kernels.replication.rows.split_returns`."""
    N, K = idx_NK.shape
    sums_NK, pairs_S = torch.empty_like(inverse_NK), inverse_NK.new_empty(rows)
    count = inverse_NK.new_zeros(1)
    if N:
        split_returns_kernel[(triton.cdiv(N, _ROWS),)](
            *(idx_NK, slot_NK, inverse_NK, sums_NK, pairs_S, count),
            *(N, *home),
            K=K,
            SLOTS=triton.next_power_of_2(K),
            ROWS=_ROWS,
        )
    return ReturnPlan(sums_NK, pairs_S, count, inverse_NK)


def sum_unreduced_rows(
    singles_KTD: Tensor, idx_TK: Tensor, slot_TK: Tensor, sums_ND: Tensor, home: ExpertOwner
) -> None:
    """`kernels.replication.rows.sum_unreduced_rows`."""
    K, T, D = singles_KTD.shape
    if T:
        sum_unreduced_rows_kernel[(triton.cdiv(T, _TOKENS),)](
            *(singles_KTD, idx_TK, slot_TK, sums_ND),
            *(T, D, home.local, home.places),
            K=K,
            SLOTS=triton.next_power_of_2(K),
            TOKENS=_TOKENS,
            COLUMNS=_COLUMNS,
        )
