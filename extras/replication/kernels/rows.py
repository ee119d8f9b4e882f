"""Expert rows that are sent to their tokens one by one, where replication splits a token's rows.

Without replication a rank adds the rows that a token has on it and sends one sum. With replication
these rows, which have one owner, may be computed on several ranks: then each is sent unreduced to
the token's rank, which adds them in the order of expert ids, rounds the sum once, and has the row
that the owner would have sent. All other rows are sent as sums, as without replication.

`split_returns` separates them, on the rank that computes them; `sum_unreduced_rows` adds those of
this rank's tokens. Each is one kernel on a GPU (`extras.replication.kernels.rows_triton`),
elsewhere the definition in this file. `send_unreduced_rows` is the definition of the exchange,
which is `kernels.sm90.exchange.combine_push` on GPUs.

Legend: T tokens of a rank, K expert ids of a token, R ranks, N = R * T received rows, S expert
rows, D hidden, L own experts of a rank, P expert slots of a rank. Expert ids idx and the expert
slots that compute these pairs are int32, -1 for none.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertOwner(NamedTuple):
    """Ranks of experts and of expert slots."""

    rank: int  # this rank
    local: int  # L; the owner of expert e is rank e // L
    local_slots: int  # P; slot p is on rank p // P


class ReturnPlan(NamedTuple):
    """Expert rows of a rank that return as sums, and those that return unreduced."""

    sums_NK: Tensor  # int32: expert rows as in `ExpertPlan` that return as sums; -1 for others
    pairs_S: Tensor  # int32: pairs n * K + k of unreduced rows, in any order; then undefined
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    """int32 [1]: number of unreduced rows."""
    inverse_NK: Tensor  # int32: expert rows of all pairs


def split_returns(
    idx_NK: Tensor, slot_NK: Tensor, inverse_NK: Tensor, rows: int, owner: ExpertOwner
) -> ReturnPlan:
    """Separate the S = `rows` rows that return as sums from those that return unreduced.

    `inverse_NK` are int32 expert rows of the pairs that this rank computes, -1 for others.
    """
    if idx_NK.is_cuda:
        from phalanx.extras.replication.kernels import rows_triton

        given = idx_NK, slot_NK, inverse_NK, rows, owner
        return ReturnPlan(*rows_triton.split_returns(*given))
    owned_NK = (idx_NK >= 0) & (idx_NK // owner.local == owner.rank)
    away_NK = owned_NK & (slot_NK // owner.local_slots != owner.rank)
    unreduced_NK = (inverse_NK >= 0) & (~owned_NK | away_NK.any(1, keepdim=True))
    pairs_S = idx_NK.new_zeros(rows)
    pair_P = torch.arange(idx_NK.numel(), dtype=torch.int32, device=idx_NK.device)
    to_P = torch.where(unreduced_NK.flatten(), unreduced_NK.flatten().cumsum(0) - 1, rows)
    pairs_S = torch.cat((pairs_S, pairs_S.new_zeros(1))).scatter_(0, to_P, pair_P)[:rows]
    count = unreduced_NK.sum(dtype=torch.int32).view(1)
    return ReturnPlan(inverse_NK.masked_fill(unreduced_NK, -1), pairs_S, count, inverse_NK)


def send_unreduced_rows(
    y_SD: Tensor, return_plan: ReturnPlan, unreduced_RKTD: Sequence[Tensor]
) -> None:
    """Definition of the exchange of unreduced rows: to [k, t] of the token's rank's [K, T, D]."""
    (K, T), D = unreduced_RKTD[0].shape[:2], y_SD.shape[1]
    row_RTK = return_plan.inverse_NK.view(-1, T, K)
    unreduced_RTK = (return_plan.inverse_NK >= 0) & (return_plan.sums_NK < 0)
    for row_TK, unreduced_TK, to_KTD in zip(
        row_RTK, unreduced_RTK.view(-1, T, K), unreduced_RKTD, strict=True
    ):
        sent_KTD = y_SD.index_select(0, row_TK.T.flatten().clamp(min=0)).view(K, T, D)
        to_KTD.copy_(torch.where(unreduced_TK.T[..., None], sent_KTD, to_KTD))


def sum_unreduced_rows(
    unreduced_KTD: Tensor, idx_TK: Tensor, slot_TK: Tensor, sums_ND: Tensor, owner: ExpertOwner
) -> None:
    """Sum the unreduced rows of this rank's tokens per owner, into the rows of the owners' sums.

    The sum is in fp32 in the order of expert ids, and rounded once.

    Args:
        unreduced_KTD: received unreduced rows; those of other pairs are not read.
        sums_ND: received sums, row h * T + t from owner h; written in place.
    """
    if unreduced_KTD.is_cuda:
        from phalanx.extras.replication.kernels import rows_triton

        return rows_triton.sum_unreduced_rows(unreduced_KTD, idx_TK, slot_TK, sums_ND, owner)
    sums_RTD = sums_ND.view(-1, *unreduced_KTD.shape[1:])
    owner_TK = torch.where(idx_TK >= 0, idx_TK // owner.local, -1)
    away_TK = (idx_TK >= 0) & (slot_TK // owner.local_slots != owner_TK)
    for rank, sum_TD in enumerate(sums_RTD):
        of_rank_TK = owner_TK == rank
        split_T = (of_rank_TK & away_TK).any(1)
        total_TD = torch.zeros_like(sum_TD, dtype=torch.float32)
        for row_TD, of_rank_T in zip(unreduced_KTD, of_rank_TK.T, strict=True):
            total_TD += torch.where((of_rank_T & split_T)[:, None], row_TD.float(), 0.0)
        sum_TD.copy_(torch.where(split_T[:, None], total_TD.to(sum_TD.dtype), sum_TD))
    return None
