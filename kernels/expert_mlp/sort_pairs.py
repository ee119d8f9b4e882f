"""The routing plan in tensor code: pairs sorted by expert, and gathers by the result.

The plan of every backend without kernels for it, and the definition for those with kernels.
Stable sorts and searches, without a host read or an atomic: the same bit for bit on CPU and GPU.

Legend: N rows received, K experts per token, L local experts, S expert rows (static).
"""

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import PlanSize
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan

_KEY = torch.int16  # two radix passes on a GPU instead of the four of int32
MAX_EXPERTS = torch.iinfo(_KEY).max  # most experts of a rank, bounded by the sort key


def sort_pairs(
    topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize, *, align: int = 1
) -> ExpertPlan:
    """`Backend.plan` in tensor code: ordered by expert, then received row, then slot.

    Args:
        align: multiple at which an expert's rows start and end. Rows without a token have index -1
            and probability 0, and count as needed; the second entry of the offsets is aligned to 16
            bytes.
    """
    if align > 1:
        return _sort_aligned(topk_idx_NK, topk_prob_NK, size, align)
    first_expert, local_experts, rows = size
    key, order, starts = _sorted(topk_idx_NK, first_expert, local_experts)
    offsets, needed = starts.clamp(max=rows), starts[-1].clone()

    row = torch.arange(key.numel(), dtype=torch.int32, device=key.device)
    used = row < offsets[-1]
    inverse = torch.empty_like(row).scatter_(0, order, row.masked_fill(~used, -1))
    token = (order // topk_idx_NK.shape[1]).to(torch.int32).masked_fill(~used, 0)
    prob = topk_prob_NK.flatten().index_select(0, order).masked_fill(~used, 0)
    return ExpertPlan(
        _fit(token, rows), _fit(prob, rows), offsets, inverse.view_as(topk_idx_NK), needed, None
    )


def _sort_aligned(
    topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize, align: int
) -> ExpertPlan:
    first_expert, local_experts, rows = size
    key, order, starts = _sorted(topk_idx_NK, first_expert, local_experts)
    counts_L = (starts.diff() + align - 1) // align * align
    offsets = starts.new_empty(local_experts + 4)[3:]  # the second entry is the fifth of 4 bytes
    offsets[0] = 0
    torch.cumsum(counts_L, 0, dtype=torch.int32, out=offsets[1:])
    needed = offsets[-1].clone()

    expert = key.long()
    position = torch.arange(key.numel(), dtype=torch.int32, device=key.device)
    row = position - starts[expert] + offsets[expert]
    offsets.clamp_(max=rows // align * align)
    used = (expert < local_experts) & (row < offsets[-1])
    inverse = torch.empty_like(row).scatter_(0, order, row.masked_fill(~used, -1))
    target = row.masked_fill(~used, rows).long()  # one extra row takes unused pairs
    token = (order // topk_idx_NK.shape[1]).to(torch.int32)
    prob = topk_prob_NK.flatten().index_select(0, order)
    index_S = token.new_full((rows + 1,), -1).scatter_(0, target, token)[:rows]
    prob_S = prob.new_zeros(rows + 1).scatter_(0, target, prob)[:rows]
    return ExpertPlan(index_S, prob_S, offsets, inverse.view_as(topk_idx_NK), needed, None)


def _sorted(topk_idx_NK: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted local experts of the pairs (L if remote), pair of each, and int32 [L + 1] starts."""
    local_NK = topk_idx_NK - first
    remote_NK = (local_NK < 0) | (local_NK >= experts)
    key = local_NK.masked_fill(remote_NK, experts).flatten().to(_KEY)
    key, order = torch.sort(key, stable=True)
    numbers = torch.arange(experts + 1, dtype=_KEY, device=key.device)
    return key, order, torch.searchsorted(key, numbers, out_int32=True)


def gather_pairs(dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
    """`kernels.expert_mlp.backend.Backend.plan_backward`."""
    grad = dprob_S.index_select(0, inverse_NK.flatten().clamp(min=0)).view_as(inverse_NK)
    return grad.masked_fill(inverse_NK < 0, 0)


def gather_rows(x_ND: Tensor, index_S: Tensor, offsets: Tensor) -> Tensor:
    """Row index[s] of x for every s; any row of x in the padding, for any content of `index`."""
    if not x_ND.shape[0]:
        return x_ND.new_zeros(index_S.shape[0], x_ND.shape[1])
    return x_ND.index_select(0, index_S.masked_fill(~used_rows(index_S, offsets), 0))


def used_rows(expert_rows: Tensor, offsets: Tensor) -> Tensor:
    """bool [S]: which of the expert rows, of any tensor [S, ...], are not padding."""
    row_S = torch.arange(expert_rows.shape[0], dtype=torch.int32, device=expert_rows.device)
    return row_S < offsets[-1]


def _fit(x: Tensor, rows: int) -> Tensor:
    """First `rows` entries of a vector, with zeros after its end."""
    return torch.nn.functional.pad(x, (0, rows - x.shape[0]))
