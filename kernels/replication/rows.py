"""Expert rows that travel to their tokens one by one, where clones part a token's rows.

Without replication a rank adds up the rows that a token has there and sends one sum. With them
these rows, which have one home rank, may be computed on several: then each goes by itself to the
token's rank, which adds them in the order of slots, rounds the sum once, and has the row that the
home rank would have sent. All other rows go as sums, as without replication.

`split_returns` says which are which, on the rank that computes them; `sum_unreduced_rows` adds
those of this rank's tokens up. Both by one kernel on a GPU (`kernels.replication.rows_triton`),
elsewhere by the definition here. `send_unreduced_rows` is the definition of what is sent, by
`kernels.sm90.exchange.combine_push` on GPUs.

Legend: T tokens of a rank, K slots of a token, R ranks, N = R * T received rows, S expert rows, D
hidden, L own experts of a rank, P places of a rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertOwner(NamedTuple):
    """Where experts and places are."""

    rank: int
    """This one."""
    local: int
    """L; expert e is at home on rank e // L."""
    places: int
    """P; place p is on rank p // P."""


class ReturnPlan(NamedTuple):
    """How the rows that a rank computes travel back."""

    sums_NK: Tensor
    """int32: expert rows as `ExpertPlan.inverse_NK`, of those that go as sums; -1 for others."""
    pairs_S: Tensor
    """int32: pairs n * K + k of rows that go by themselves, in any order; anything behind."""
    count: Tensor
    """int32 [1]: how many these are."""
    inverse_NK: Tensor
    """int32: expert rows of all."""


def split_returns(
    idx_NK: Tensor, slot_NK: Tensor, inverse_NK: Tensor, rows: int, home: ExpertOwner
) -> ReturnPlan:
    """Which rows go as sums, and which by themselves.

    Args:
        idx_NK: int32 experts of all ranks' tokens, -1 for none.
        slot_NK: int32, where these are computed.
        inverse_NK: int32, expert rows of those that this rank computes, -1 of others.
        rows: S.
        home: of this rank.
    """
    if idx_NK.is_cuda:
        from phalanx.kernels.replication import rows_triton

        return rows_triton.split_returns(idx_NK, slot_NK, inverse_NK, rows, home)
    mine_NK = (idx_NK >= 0) & (idx_NK // home.local == home.rank)
    away_NK = mine_NK & (slot_NK // home.places != home.rank)
    single_NK = (inverse_NK >= 0) & (~mine_NK | away_NK.any(1, keepdim=True))
    pairs_S = idx_NK.new_zeros(rows)
    pair_P = torch.arange(idx_NK.numel(), dtype=torch.int32, device=idx_NK.device)
    to_P = torch.where(single_NK.flatten(), single_NK.flatten().cumsum(0) - 1, rows)
    pairs_S = torch.cat((pairs_S, pairs_S.new_zeros(1))).scatter_(0, to_P, pair_P)[:rows]
    count = single_NK.sum(dtype=torch.int32).view(1)
    return ReturnPlan(inverse_NK.masked_fill(single_NK, -1), pairs_S, count, inverse_NK)


def send_unreduced_rows(
    y_SD: Tensor, return_plan: ReturnPlan, singles_RKTD: Sequence[Tensor]
) -> None:
    """Definition: rows that go by themselves, to slot k and token t of the token's rank.

    Args:
        y_SD: expert rows.
        parting: of this rank's rows.
        singles_RKTD: memory [K, T, D] of each rank.
    """
    (K, T), D = singles_RKTD[0].shape[:2], y_SD.shape[1]
    row_RTK = return_plan.inverse_NK.view(-1, T, K)
    single_RTK = (return_plan.inverse_NK >= 0) & (return_plan.sums_NK < 0)
    for row_TK, single_TK, to_KTD in zip(
        row_RTK, single_RTK.view(-1, T, K), singles_RKTD, strict=True
    ):
        sent_KTD = y_SD.index_select(0, row_TK.T.flatten().clamp(min=0)).view(K, T, D)
        to_KTD.copy_(torch.where(single_TK.T[..., None], sent_KTD, to_KTD))


def sum_unreduced_rows(
    singles_KTD: Tensor, idx_TK: Tensor, slot_TK: Tensor, sums_ND: Tensor, home: ExpertOwner
) -> None:
    """Sums of this rank's tokens that no home rank has sent, to where they would have come.

    In fp32 in the order of slots, and rounded once.

    Args:
        singles_KTD: rows that have come by themselves; those of other pairs are not read.
        idx_TK: int32 experts of this rank's tokens, -1 for none.
        slot_TK: int32, where these are computed.
        sums_ND: sums that have come, row h * T + t of home rank h; is added to.
        home: of this rank.
    """
    if singles_KTD.is_cuda:
        from phalanx.kernels.replication import rows_triton

        return rows_triton.sum_unreduced_rows(singles_KTD, idx_TK, slot_TK, sums_ND, home)
    sums_RTD = sums_ND.view(-1, *singles_KTD.shape[1:])
    home_TK = torch.where(idx_TK >= 0, idx_TK // home.local, -1)
    away_TK = (idx_TK >= 0) & (slot_TK // home.places != home_TK)
    for rank, sum_TD in enumerate(sums_RTD):
        of_TK = home_TK == rank
        parted_T = (of_TK & away_TK).any(1)
        total_TD = torch.zeros_like(sum_TD, dtype=torch.float32)
        for row_TD, of_T in zip(singles_KTD, of_TK.T, strict=True):
            total_TD += torch.where((of_T & parted_T)[:, None], row_TD.float(), 0.0)
        sum_TD.copy_(torch.where(parted_T[:, None], total_TD.to(sum_TD.dtype), sum_TD))
    return None
