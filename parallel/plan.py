"""Routing plan of one rank: which received rows its experts read, in expert order.

Sits between dispatch and the experts: `make_plan` turns the routing of all received tokens into
static buffers of S rows plus device offsets. Pure tensor code without a host read or an atomic, so
it is the same bit for bit on CPU and GPU, run after run. Rows are ordered by expert, then received
row, then slot.

Legend: N rows received, K experts per token, L local experts, S expert rows kept (static).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_KEY = torch.int16  # two radix passes on a GPU instead of the four of int32


class Plan(NamedTuple):
    """Expert rows offsets[e] up to offsets[e + 1] are local expert e's; the rest is padding."""

    row_index_S: Tensor
    """int32: received row that expert row s reads; 0 in the padding."""
    row_prob_S: Tensor
    """fp32: routing probability of expert row s, differentiable; 0 in the padding."""
    offsets: Tensor
    """int32 [L + 1]: first expert row of each local expert, clamped to S."""
    inverse_NK: Tensor
    """int32: expert row of a (received row, slot) pair; -1 if its expert is elsewhere or past S."""
    needed: Tensor
    """int32 scalar: expert rows of all pairs that are local; above S the plan has overflowed."""


def make_plan(
    topk_idx_NK: Tensor,
    topk_prob_NK: Tensor,
    *,
    first_expert: int,
    local_experts: int,
    rows: int,
) -> Plan:
    """Sort the pairs of this rank's experts into `rows` expert rows.

    Args:
        topk_idx_NK: int32 global expert ids; an id outside this rank's range has no row here.
        topk_prob_NK: fp32 probabilities; gradients flow back through `row_prob_S`.
        first_expert: global id of local expert 0.
        local_experts: L.
        rows: S. If more are needed the last experts lack rows; `needed` tells: rerun the step.

    Raises:
        ValueError: shapes or dtypes do not fit, or a size is out of range.
    """
    check_routing(topk_idx_NK, topk_prob_NK)
    if not 1 <= local_experts <= torch.iinfo(_KEY).max:
        raise ValueError(f"a rank holds 1 to {torch.iinfo(_KEY).max} experts, not {local_experts}")
    if rows < 1:
        raise ValueError(f"an expert buffer needs at least one row, not {rows}")
    local_NK = topk_idx_NK - first_expert
    elsewhere_NK = (local_NK < 0) | (local_NK >= local_experts)
    key = local_NK.masked_fill(elsewhere_NK, local_experts).flatten().to(_KEY)
    key, order = torch.sort(key, stable=True)

    experts = torch.arange(local_experts + 1, dtype=_KEY, device=key.device)
    starts = torch.searchsorted(key, experts, out_int32=True)
    offsets, needed = starts.clamp(max=rows), starts[-1]

    row = torch.arange(key.numel(), dtype=torch.int32, device=key.device)
    used = row < offsets[-1]
    inverse = torch.empty_like(row).scatter_(0, order, row.masked_fill(~used, -1))
    token = (order // topk_idx_NK.shape[1]).to(torch.int32).masked_fill(~used, 0)
    prob_S = _GatherPairs.apply(
        topk_prob_NK.flatten(), _fit(order, rows), _fit(used, rows), inverse
    )
    return Plan(_fit(token, rows), prob_S, offsets, inverse.view_as(topk_idx_NK), needed)


def check_routing(topk_idx: Tensor, topk_prob: Tensor) -> None:
    """Raise ValueError unless ids and probabilities are [tokens, top_k] in int32 and float32."""
    if topk_idx.ndim != 2 or topk_idx.shape != topk_prob.shape:
        raise ValueError(
            f"topk_idx {tuple(topk_idx.shape)} and topk_prob {tuple(topk_prob.shape)} "
            "must both be [tokens, top_k]"
        )
    if topk_idx.dtype != torch.int32 or topk_prob.dtype != torch.float32:
        raise ValueError(
            "topk_idx must be int32 and topk_prob float32, "
            f"not {topk_idx.dtype} and {topk_prob.dtype}"
        )


def _fit(x: Tensor, rows: int) -> Tensor:
    """First `rows` entries of a vector, with zeros after its end."""
    return torch.nn.functional.pad(x, (0, rows - x.shape[0]))


class _GatherPairs(torch.autograd.Function):
    """out[s] = pairs[order[s]] where used[s], else 0; backward is a gather too, by the inverse."""

    @staticmethod
    def forward(
        ctx: Any, pairs: Tensor, order_S: Tensor, used_S: Tensor, inverse: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        return pairs.index_select(0, order_S).masked_fill(~used_S, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        grad = grad_S.index_select(0, inverse.clamp(min=0))
        return grad.masked_fill(inverse < 0, 0), None, None, None
