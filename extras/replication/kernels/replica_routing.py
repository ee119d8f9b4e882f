"""Routing with expert replication: the slot of every pair of a token and an expert.

A rank has L + G expert slots: its own experts, and its replica slots. The slot of a pair is rank *
(L + G) + local expert, or rank * (L + G) + L + replica slot. With slots in place of expert ids all
later steps are as without replication: `kernels.routing.plan` orders a rank's rows by slot, and
tokens are sent to the ranks of their slots. `count_rows` and `assign_pairs` are the definition in
tensor code, without a host read; `extras.replication.kernels.replica_routing_triton` computes the
same in three launches, bit for bit.

Legend: N received rows (those of all ranks, rank-major), K expert ids of a token, E experts, R
ranks, L experts and G replica slots of a rank, P = N * K pairs.
"""

import torch
from torch import Tensor

from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationPlan,
    ReplicationSize,
    make_replication_plan,
)


def route_to_replicas(
    idx_NK: Tensor, experts: int, size: ReplicationSize
) -> tuple[ReplicationPlan, Tensor]:
    """The plan of a micro-batch and the slot of every pair, by kernels on a GPU.

    Args:
        idx_NK: int32 expert ids of all ranks' tokens, -1 for none.
        experts: E.
        size: size of the plan.

    Raises:
        ValueError: as `make_replication_plan` does.
    """
    if not idx_NK.is_cuda:
        plan = make_replication_plan(count_rows(idx_NK, experts), size)
        return plan, assign_pairs(idx_NK, plan)
    from phalanx.extras.replication.kernels import replica_routing_triton as kernels

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
    """Slot of the copy that computes each pair, int32 [N, K], -1 without an expert.

    Args:
        idx_NK: int32 expert ids of all ranks' tokens, -1 for none.
        plan: plan of their counts.
    """
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
