"""Plan of expert replication for a micro-batch: experts, slots, the rows of each copy, and pairs.

Every rank of an expert-parallel group has the routing of all tokens of a micro-batch before these
are sent. From the number of rows of every expert it computes this plan, the same on all ranks: in
integers, with static shapes, no host read, ties to the lower number. `reference_replication_plan`,
`count_rows` and `assign_pairs` are the definition, in torch on any device;
`extras.replication.kernels.replication_plan_triton` computes the same bit for bit.

The load of a rank is the number of rows that it computes, plus `cost` for every copy that it lends
or borrows: the rows that it could compute while an expert's weights pass its link. Until there is
no gain, the rank of the largest load lends its expert with most rows to the rank of the smallest
load that has a free slot and no copy of it, with as many rows as bring one of the two to a level:
the one that the owner would reach with the 1, 2, ... such ranks of smallest loads, where that is
lowest, or the mean load if that is higher, as other ranks need their share of them. The plan is the
prefix of steps with the smallest largest load; it is empty where the largest load falls by less
than `least`, which covers the fixed cost of copies in a layer. This is greedy list scheduling
(Graham, 1969) of divisible experts; its largest load is within 1.25 of the optimum on all small
cases of the tests, and within 1.015 on average. Replicas that last for a micro-batch are from ECHO
(Megatron-LM, issue 2368).

A rank has L + G expert slots: its own experts, and its replica slots. The slot of a pair of a token
and an expert is rank * (L + G) + local expert, or rank * (L + G) + L + replica slot. With slots in
place of expert ids all later steps are as without replication.

Legend: E experts, R ranks, L = E / R experts and G (N in the plan) replica slots of a rank, N
received rows (those of all ranks, rank-major), K expert ids of a token, P = N * K pairs.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.configs.tables.transports import MAX_REPLICATED_EXPERTS, MAX_REPLICATION_RANKS


class ReplicationSize(NamedTuple):
    """Parameters of a plan other than the rows of experts."""

    ranks: int  # R; the owner of expert e is rank e // L
    slots: int  # N
    cost: int  # rows that a copy costs its owner, and its borrower (`replica_cost`)
    tile: int = 128  # alignment of parts of an expert's rows: whole GEMM tiles and FP8 blocks
    least: int = 0  # rows by which the largest load has to fall; otherwise there are no copies


class ReplicationPlan(NamedTuple):
    """int32 tensors on the device. Rows of an expert count in the order of received rows."""

    expert_RN: Tensor  # expert in each replica slot, -1 for none
    begin_RN: Tensor  # first of its rows that the slot takes; 0 in an empty slot
    end_RN: Tensor  # end of its rows; 0 in an empty slot
    owner_rows_E: Tensor  # number of first rows that the owner computes
    load_2R: Tensor  # load of each rank without replication, and with it


def replica_cost(
    weight_bytes: int, *, bytes_per_second: float, seconds_per_row: float, exposed: float = 1.0
) -> int:
    """`ReplicationSize.cost` from rates that were measured.

    Args:
        weight_bytes: bytes that pass a link for a copy, in all passes.
        bytes_per_second: rate of the link of a rank, in one direction.
        seconds_per_row: time per row of an expert, in the same passes.
        exposed: part of the time on the link that is not hidden.

    Raises:
        ValueError: a rate that is not above 0, or a part that is not from 0 to 1.
    """
    if not (bytes_per_second > 0 and seconds_per_row > 0 and 0 <= exposed <= 1):
        raise ValueError(
            f"a replica cannot be weighed by {bytes_per_second} bytes/s, {seconds_per_row} s a row "
            f"and an exposed part of {exposed}: rates are above 0, the part is from 0 to 1"
        )
    return math.ceil(exposed * weight_bytes / bytes_per_second / seconds_per_row)


def make_replication_plan(count: Tensor, size: ReplicationSize) -> ReplicationPlan:
    """The plan of a micro-batch from rows of experts, int32 [E], or [C, E] per chunk of tokens.

    Raises:
        ValueError: sizes that do not fit together, or too large for the kernel.
    """
    check_size(count, size)
    counts_CE = torch.atleast_2d(count)
    if not counts_CE.is_cuda:
        return reference_replication_plan(counts_CE.sum(0, dtype=torch.int32), size)
    from phalanx.extras.replication.kernels.replication_plan_triton import (
        replication_plan_in_triton,
    )

    return ReplicationPlan(*replication_plan_in_triton(counts_CE, size))


def check_size(count: Tensor, size: ReplicationSize) -> None:
    """Raise ValueError for sizes that the plan does not support."""
    if count.ndim not in (1, 2) or count.dtype != torch.int32:
        raise ValueError(
            "rows of experts must be int32 [experts] or [chunks, experts], not "
            f"{count.dtype} {list(count.shape)}"
        )
    E, R = count.shape[-1], size.ranks
    if R < 1 or E < R or E % R:
        raise ValueError(f"{E} experts do not divide over {R} ranks")
    # The kernel's one program has all of them in registers.
    if E > MAX_REPLICATED_EXPERTS or R > MAX_REPLICATION_RANKS:
        raise ValueError(
            f"replicas are planned for at most {MAX_REPLICATED_EXPERTS} experts on "
            f"{MAX_REPLICATION_RANKS} ranks, not {E} on {R}: set parallel.expert_replication=0"
        )
    if min(size.slots, size.cost, size.least) < 0 or size.tile < 1:
        raise ValueError(f"slots, cost, least and tile of {size} must be at least 0, 0, 0 and 1")


def reference_replication_plan(count_E: Tensor, size: ReplicationSize) -> ReplicationPlan:
    """The definition, in tensor code without a host read."""
    (R, N, cost, tile, least), device = size, count_E.device
    E, L = count_E.numel(), count_E.numel() // R
    rank_R = torch.arange(R, device=device)
    expert_E = torch.arange(E, device=device)
    rows_E, before_R = count_E.long(), count_E.view(R, L).sum(1)
    load_R = before_R.clone()
    used_R = torch.zeros_like(load_R)
    # Expert, begin and end of each slot.
    slot_3RN = torch.zeros(3, R, N, dtype=torch.int64, device=device)
    slot_3RN[0] = -1
    none = best = [slot_3RN, rows_E, load_R]
    going = torch.ones((), dtype=torch.bool, device=device)
    for _ in range(R * N):
        # torch.argmax may return any of several maxima: `_first` finds the first.
        owner = _first(load_R == load_R.max())
        owned_rows_E = torch.where(expert_E // L == owner, rows_E, -1)
        expert = _first(owned_rows_E == owned_rows_E.max())
        open_R = (used_R < N) & (rank_R != owner) & (slot_3RN[0] != expert).all(1)
        open_load_R = torch.where(open_R, load_R, load_R.max() + 1)
        borrower = _first(open_load_R == open_load_R.min())
        # With the copy's cost on both sides; means are rounded up.
        high, low = _at(load_R, owner) + cost, _at(load_R, borrower) + cost
        mean = (load_R.sum() + 2 * cost + R - 1) // R
        level = torch.maximum(mean, _level(load_R, open_R, high - cost, cost))
        expert_rows = _at(rows_E, expert)
        moved_max = torch.minimum(expert_rows, torch.minimum(high - level, level - low))
        begin = (expert_rows - moved_max + tile - 1) // tile * tile
        moved = expert_rows - begin
        gains = torch.maximum(high - moved, low + moved) < high - cost
        going = going & open_R.any() & (moved > 0) & gains
        slot = _at(used_R, borrower)
        slot_mask = going & (rank_R == borrower)[:, None] & (torch.arange(N, device=device) == slot)
        taken = torch.stack((expert, begin, expert_rows))
        slot_3RN = torch.where(slot_mask, taken[:, None, None], slot_3RN)
        rows_E = torch.where(going & (expert_E == expert), begin, rows_E)
        load_R = torch.where(going & (rank_R == owner), high - moved, load_R)
        load_R = torch.where(going & (rank_R == borrower), low + moved, load_R)
        used_R = used_R + (going & (rank_R == borrower))
        better = load_R.max() < best[2].max()
        current = (slot_3RN, rows_E, load_R)
        best = [torch.where(better, a, b) for a, b in zip(current, best, strict=True)]
    worth = before_R.max() - best[2].max() >= least
    best = [torch.where(worth, a, b) for a, b in zip(best, none, strict=True)]
    slots, owner_rows_E, after_R = (t.int() for t in best)
    expert_RN, begin_RN, end_RN = slots
    load_2R = torch.stack((before_R.int(), after_R))
    return ReplicationPlan(expert_RN, begin_RN, end_RN, owner_rows_E, load_2R)


def _level(load_R: Tensor, open_R: Tensor, most: Tensor, cost: int) -> Tensor:
    """Lowest mean of the load `most` and those of the 1, 2, ... least open ranks.

    It includes the costs of as many copies, half of which the owner has.
    """
    rank_R = torch.arange(load_R.numel(), device=load_R.device)
    before_RR = load_R[None] < load_R[:, None]
    before_RR |= (load_R[None] == load_R[:, None]) & (rank_R[None] <= rank_R[:, None])
    before_RR &= open_R[None]
    copies_R, sum_R = before_RR.sum(1), torch.where(before_RR, load_R[None], 0).sum(1)
    mean_R = (most + sum_R + 2 * cost * copies_R + copies_R) // (copies_R + 1)
    level_R = torch.maximum(mean_R, cost * copies_R)
    return torch.where(open_R, level_R, most).min()


def _first(mask: Tensor) -> Tensor:
    index = torch.arange(mask.numel(), device=mask.device)
    return torch.where(mask, index, mask.numel()).min()


def _at(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(0, index[None])[0]


def route_to_replicas(
    idx_NK: Tensor, experts: int, size: ReplicationSize
) -> tuple[ReplicationPlan, Tensor]:
    """The plan of a micro-batch and the slot of every pair, by kernels on a GPU."""
    if not idx_NK.is_cuda:
        plan = make_replication_plan(count_rows(idx_NK, experts), size)
        return plan, assign_pairs(idx_NK, plan)
    from phalanx.extras.replication.kernels import replication_plan_triton as kernels

    counts_CE = kernels.count_chunks(idx_NK, experts)
    plan = make_replication_plan(counts_CE, size)
    return plan, kernels.assign_pairs(idx_NK, counts_CE, plan)


def count_rows(idx_NK: Tensor, experts: int) -> Tensor:
    """Number of rows of each expert, int32 [E]; the id -1 is no expert."""
    flat = idx_NK.flatten().long()
    counts = flat.new_zeros(experts + 1).scatter_add_(
        0, flat % (experts + 1), torch.ones_like(flat)
    )
    return counts[:experts].int()


def assign_pairs(idx_NK: Tensor, plan: ReplicationPlan) -> Tensor:
    """Slot of the copy that computes each pair, int32 [N, K], -1 without an expert."""
    (R, G), E = plan.expert_RN.shape, plan.owner_rows_E.numel()
    L = E // R
    expert_P = idx_NK.flatten()
    slot_P = torch.where(expert_P >= 0, expert_P // L * (L + G) + expert_P % L, -1)
    if G:
        number_P = pair_numbers(expert_P, E)
        slots = (t.flatten() for t in (plan.expert_RN, plan.begin_RN, plan.end_RN))
        for slot, (expert, begin, end) in enumerate(zip(*map(Tensor.unbind, slots), strict=True)):
            taken_P = (expert_P == expert) & (number_P >= begin) & (number_P < end)
            slot_P = slot_P.masked_fill(taken_P, slot // G * (L + G) + L + slot % G)
    return slot_P.view_as(idx_NK)


def pair_numbers(expert_P: Tensor, experts: int) -> Tensor:
    """Number of earlier pairs of the same expert, int32 [P]; undefined for the id -1."""
    key_P = torch.where(expert_P >= 0, expert_P, experts)
    key_P, order_P = torch.sort(key_P, stable=True)
    starts = torch.searchsorted(key_P, torch.arange(experts + 1, device=key_P.device))
    row_P = torch.arange(key_P.numel(), device=key_P.device)
    number_P = row_P - starts.index_select(0, key_P.long())
    return torch.empty_like(number_P).scatter_(0, order_P, number_P).int()
