"""Routing with replication: every pair of a token and an expert gets the copy that computes it.

A rank with replication has L + G places for experts: its own, and its replica slots. A pair's place
is rank * (L + G) + own expert or L + slot. In ids of places everything behind goes on as without
clones: `kernels.routing.plan` orders a rank's rows by place, and sends of tokens look at the ranks
of places. `count_rows` and `assign_pairs` are the definition in tensor code, without a host read;
`kernels.routing.replica_routing_triton` has the same in three launches, bit for bit.

Legend: N received rows (those of all ranks, rank-major), K slots of a token, E experts, R ranks, L
experts and G replica slots of a rank, P = N * K pairs.
"""

import torch
from torch import Tensor

from phalanx.kernels.routing.replication_plan import (
    ReplicationPlan,
    ReplicationSize,
    make_replication_plan,
)


def route_to_replicas(
    idx_NK: Tensor, experts: int, size: ReplicationSize
) -> tuple[ReplicationPlan, Tensor]:
    """The plan of a micro-batch and the place of every pair: by kernels on a GPU, elsewhere by the
    definition.

    Args:
        idx_NK: int32 ids of experts, -1 for none, of all ranks' tokens.
        experts: E.
        size: of the plan.

    Raises:
        ValueError: as `make_replication_plan` does.
    """
    if not idx_NK.is_cuda:
        plan = make_replication_plan(count_rows(idx_NK, experts), size)
        return plan, assign_pairs(idx_NK, plan)
    from phalanx.kernels.routing import replica_routing_triton as kernels

    counts_CE = kernels.count_chunks(idx_NK, experts)
    plan = make_replication_plan(counts_CE, size)
    return plan, kernels.place(idx_NK, counts_CE, plan)


def count_rows(idx_NK: Tensor, experts: int) -> Tensor:
    """int32 [E]: rows of each expert; -1 is no expert."""
    flat = idx_NK.flatten().long()
    counts = flat.new_zeros(experts + 1).scatter_add_(
        0, flat % (experts + 1), torch.ones_like(flat)
    )
    return counts[:experts].int()


def assign_pairs(idx_NK: Tensor, plan: ReplicationPlan) -> Tensor:
    """int32 [N, K]: the place of the copy that computes each pair, -1 without an expert.

    Args:
        idx_NK: int32 ids of experts, -1 for none, of all ranks' tokens.
        plan: of their counts.
    """
    (R, G), E = plan.expert_RN.shape, plan.kept_E.numel()
    L = E // R
    expert_P = idx_NK.flatten()
    place_P = torch.where(expert_P >= 0, expert_P // L * (L + G) + expert_P % L, -1)
    if G:
        number_P = numbers(expert_P, E)
        slots = (t.flatten() for t in (plan.expert_RN, plan.begin_RN, plan.end_RN))
        for at, (expert, begin, end) in enumerate(zip(*map(Tensor.unbind, slots), strict=True)):
            mine_P = (expert_P == expert) & (number_P >= begin) & (number_P < end)
            place_P = place_P.masked_fill(mine_P, at // G * (L + G) + L + at % G)
    return place_P.view_as(idx_NK)


def numbers(expert_P: Tensor, experts: int) -> Tensor:
    """int32 [P]: how many pairs of the same expert are before each; of -1 any number."""
    key_P = torch.where(expert_P >= 0, expert_P, experts)
    key_P, order_P = torch.sort(key_P, stable=True)
    starts = torch.searchsorted(key_P, torch.arange(experts + 1, device=key_P.device))
    row_P = torch.arange(key_P.numel(), device=key_P.device)
    number_P = row_P - starts.index_select(0, key_P.long())
    return torch.empty_like(number_P).scatter_(0, order_P, number_P).int()
