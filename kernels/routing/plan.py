"""Routing plan of one rank: which received rows its experts read, in expert order.

Sits between dispatch and the experts: `make_plan` turns the routing of all received tokens into
static buffers of S rows plus device offsets. No host reads, no atomics whose order affects the
result: it is the same bit for bit for every backend, on CPU and GPU, run after run. Rows are
ordered by expert, then received row, then slot.

Legend: N rows received, K experts per token, L local experts, S expert rows (static).
"""

from typing import Any

import torch
from torch import Tensor

from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.kernels.derivatives import first_order
from phalanx.kernels.expert_mlp import debug
from phalanx.kernels.expert_mlp.backend import PlanSize
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.providers import provider
from phalanx.kernels.expert_mlp.sort_pairs import MAX_EXPERTS


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
        topk_prob_NK: fp32 probabilities; gradients flow back through `row_prob_S`.
        first_expert: global id of local expert 0.
        local_experts: L.
        rows: S. If `needed` is larger, the last experts lack rows: rerun the step with more.
        backend: `reference`, `torch` or `fused`, with equal results; `cudnn`, whose experts' rows
            are padded (`pads_rows_to` of `configs.tables.backends`).
        experts: number of all ranks' experts; if set, PHALANX_DEBUG=1 checks that ids are from -1
            to experts - 1.

    Raises:
        ValueError: shapes or dtypes do not fit, a size is out of range, or an unknown backend; with
            PHALANX_DEBUG=1 an id that is neither an expert's nor -1.
    """
    check_routing(topk_idx_NK, topk_prob_NK)
    if experts is not None and debug.on():
        debug.check_expert_ids(topk_idx_NK, experts)
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


@torch.library.custom_op("phalanx::plan", mutates_args=())
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


@torch.library.custom_op("phalanx::plan_backward", mutates_args=())
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
    grad = None if grad_S is None else _gradients_of_pairs(grad_S, *ctx.saved_tensors, ctx.backend)
    return None, grad, None, None, None, None


_sort = first_order(plan, "the expert MLP", _backward, _save_inverse)
_gradients_of_pairs = first_order(plan_backward, "the expert MLP")
