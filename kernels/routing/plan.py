"""Routing plan of one rank: which received rows its experts read, in expert order.

Sits between dispatch and the experts: `make_plan` turns the routing of all received tokens into
static buffers of S rows plus device offsets. No host reads, no atomics whose order affects the
result: it is the same bit for bit for every backend, on CPU and GPU. Rows are ordered by expert,
then received row, then slot. `pack_routing` and `unpack_routing` are the routing on its way between
ranks, each one launch.

Legend: T tokens of a rank, R ranks, N rows received (R * T), K experts per token, L local experts,
S expert rows (static), P expert slots of a rank: L of own experts, then those of replicas.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.kernels.custom_op import custom_op
from phalanx.kernels.derivatives import first_order
from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.expert_plan import (
    MAX_EXPERTS,
    ExpertPlan,
    PlanSize,
    check_expert_ids,
    is_debugging,
)

_PIECE = 4  # granularity in int32 of a rank's block of routing: 16 bytes


def routing_size(tokens: int, slots: int) -> int:
    """Number of int32 in a rank's block of routing."""
    return -(-2 * tokens * slots // _PIECE) * _PIECE


def pack_routing(
    idx_TK: Tensor, prob_TK: Tensor, *, ranks: int, local: int
) -> tuple[Tensor, Tensor]:
    """The routing that a rank sends to all others, and the rows of the sums that they return.

    Args:
        idx_TK: int32 expert ids, -1 for none; contiguous, as probabilities, fp32, are.
        local: number of experts per rank.

    Returns:
        int32 [1, P]: ids, bits of the probabilities, and padding to 16 bytes, which is unspecified;
        int32 [T, R]: received row r * T + t of token t on each rank r that has one of its experts,
        else -1.
    """
    T, K = idx_TK.shape
    side = idx_TK.new_empty(1, routing_size(T, K))
    bits_TK = prob_TK.detach().view(torch.int32)
    if idx_TK.is_cuda:
        from phalanx.kernels.routing.plan_triton import pack

        rows_TR = idx_TK.new_empty(T, ranks)
        pack(idx_TK, bits_TK, side, rows_TR, local)
        return side, rows_TR
    torch.cat((idx_TK.flatten(), bits_TK.flatten()), out=side[0, : 2 * T * K])
    rank_TK = torch.where(idx_TK >= 0, idx_TK // local, -1)
    rank_R = torch.arange(ranks, dtype=torch.int32)
    row_TR = torch.arange(T, dtype=torch.int32)[:, None] + rank_R * T
    return side, torch.where((rank_TK[:, :, None] == rank_R).any(1), row_TR, -1)


def unpack_routing(blocks_RP: Tensor, tokens: int, slots: int) -> tuple[Tensor, Tensor]:
    """Ids int32 [N, K] and probabilities fp32 [N, K] of all ranks."""
    R, pairs = blocks_RP.shape[0], tokens * slots
    idx_NK = blocks_RP.new_empty(R * tokens, slots)
    prob_NK = torch.empty_like(idx_NK, dtype=torch.float32)
    bits_NK = prob_NK.view(torch.int32)
    if blocks_RP.is_cuda:
        from phalanx.kernels.routing.plan_triton import unpack

        unpack(blocks_RP, idx_NK, bits_NK)
    else:
        idx_NK.view(R, -1).copy_(blocks_RP[:, :pairs])
        bits_NK.view(R, -1).copy_(blocks_RP[:, pairs : 2 * pairs])
    return idx_NK, prob_NK


def make_plan(
    topk_idx_NK: Tensor,
    topk_prob_NK: Tensor,
    *,
    first_expert: int,
    local_experts: int,
    rows: int,
    backend: str = "torch",
    experts: int | None = None,
) -> ExpertPlan:
    """Sort the pairs of this rank's experts into `rows` expert rows.

    Args:
        topk_idx_NK: int32 global expert ids; ids outside this rank's range have no row here:
            experts of other ranks, -1 for no expert, and ids of no expert at all.
        topk_prob_NK: fp32; gradients flow back through `row_prob_S`.
        first_expert: global id of local expert 0.
        rows: S. If `needed` is larger, the last experts lack rows: rerun the step with more.
        backend: `reference`, `torch` or `fused`, with equal results; `cudnn`, whose experts' rows
            are padded (`pads_rows_to` of `configs.tables.backends`).
        experts: of all ranks; if set, PHALANX_DEBUG=1 checks that ids are from -1 to experts - 1.

    Raises:
        ValueError: shapes or dtypes do not fit, a size is out of range, or an unknown backend; with
            PHALANX_DEBUG=1 an id that is neither an expert's nor -1.
    """
    check_routing(topk_idx_NK, topk_prob_NK)
    if experts is not None and is_debugging():
        check_expert_ids(topk_idx_NK, experts)
    if not 1 <= local_experts <= MAX_EXPERTS:
        raise ValueError(f"a rank holds 1 to {MAX_EXPERTS} experts, not {local_experts}")
    if rows < 1:
        raise ValueError(f"an expert buffer needs at least one row, not {rows}")
    prob_S, index_S, offsets, inverse_NK, needed, order_L = _sort(
        topk_idx_NK, topk_prob_NK, first_expert, local_experts, rows, backend
    )
    order = order_L if order_L.numel() else None
    return ExpertPlan(index_S, prob_S, offsets, inverse_NK, needed, order)


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


# The differentiable result comes first.
_Tensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@custom_op("plan")
def plan(
    topk_idx: Tensor, topk_prob: Tensor, first_expert: int, experts: int, rows: int, backend: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Probabilities, index, offsets, inverse, needed and order (empty if there is none)."""
    expert_plan = provider(backend).plan(
        topk_idx.contiguous(),
        topk_prob.contiguous(),
        PlanSize(first_expert, experts, rows),
    )
    assert expert_plan.row_index_S is not None and expert_plan.row_prob_S is not None
    assert expert_plan.inverse_NK is not None and expert_plan.needed is not None
    order_L = topk_idx.new_empty(0) if expert_plan.order_L is None else expert_plan.order_L
    tensors = (
        expert_plan.row_index_S,
        expert_plan.offsets,
        expert_plan.inverse_NK,
        expert_plan.needed,
    )
    return expert_plan.row_prob_S, *tensors, order_L


@plan.register_fake
def _(
    topk_idx: Tensor, topk_prob: Tensor, first_expert: int, experts: int, rows: int, backend: str
) -> _Tensors:
    return (
        topk_prob.new_empty(rows),
        topk_idx.new_empty(rows),
        topk_idx.new_empty(experts + 1),
        topk_idx.new_empty(topk_idx.shape),
        topk_idx.new_empty(()),
        topk_idx.new_empty(experts if EXPERT_BACKENDS[backend].orders_experts else 0),
    )


@custom_op("plan_backward")
def plan_backward(grad_S: Tensor, inverse: Tensor, backend: str) -> Tensor:
    """The gradient of each pair's row; 0 for a pair without a row."""
    return provider(backend).plan_backward(grad_S.contiguous(), inverse)


@plan_backward.register_fake
def _(grad_S: Tensor, inverse: Tensor, backend: str) -> Tensor:
    return grad_S.new_empty(inverse.shape)


def _save_inverse(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
    ctx.save_for_backward(output[3])
    ctx.backend = inputs[-1]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_S: Tensor | None, *_: None) -> tuple[Any, ...]:
    grad = None if grad_S is None else gradients_of_pairs(grad_S, *ctx.saved_tensors, ctx.backend)
    return None, grad, None, None, None, None


_sort = first_order(plan, "the expert MLP", _backward, _save_inverse)
gradients_of_pairs = first_order(plan_backward, "the expert MLP")


def split_order(order_P: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Order of the first `own` slots, and of the slots behind them, numbered from 0.

    The fused scheduler takes experts in it. `order_P` is int32, each slot once. One Triton launch
    on CUDA, with the bits of `split_order_by_sort`.
    """
    if not order_P.is_cuda:
        return split_order_by_sort(order_P, own)
    from phalanx.kernels.routing.plan_triton import split_order_in_triton

    return split_order_in_triton(order_P, own)


def split_order_by_sort(order_P: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """The definition of `split_order`."""
    is_replica = (order_P >= own).to(torch.uint8)
    split_P = order_P.index_select(0, is_replica.sort(stable=True).indices)
    return split_P[:own], split_P[own:] - own
