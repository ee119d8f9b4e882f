"""Dispatch and combine: tokens to the ranks of their experts, experts' rows back to their tokens.

The two ends of an MoE layer around the experts. Every transport delivers fixed rows: token t of
rank r of the expert-parallel group is received row r * T + t on every rank, so no host ever knows a
count and all shapes are static. T must be the same on all ranks of the group. Both directions are
differentiable and deterministic: contributions of ranks are summed in fp32 in an order that depends
on shapes alone.

Legend: T tokens per rank, D hidden, K experts per token, R ranks, N = R * T, S expert rows.
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.grouped_mlp import combine as combine_experts
from parallel.overflow import Budget
from parallel.plan import Plan, check_routing, make_plan


class Received(NamedTuple):
    """What a rank's experts work on."""

    rows_ND: Tensor
    """Received tokens, rank-major. Rows that `plan` does not name are unspecified: never read."""
    plan: Plan
    """Which of the rows each local expert reads."""
    ready: Tensor | None
    """Device flags that a kernel must wait on before it reads rows, or None: all rows are there."""


class Dispatcher(Protocol):
    """A transport between tokens and experts. It keeps no state between calls."""

    def dispatch(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Received:
        """Bring tokens (bf16 or fp32), expert ids (int32) and probabilities (fp32) to experts."""
        ...

    def combine(self, y_SD: Tensor, received: Received) -> Tensor:
        """Sum the experts' rows of every token on its rank, in fp32: [T, D] in y's dtype."""
        ...


class Local:
    """All experts on this rank: nothing is copied."""

    def __init__(self, experts: int, top_k: int, budget: Budget) -> None:
        self._experts, self._top_k, self._budget = experts, top_k, budget

    def dispatch(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Received:
        _check(x_TD, topk_idx_TK, topk_prob_TK, self._top_k)
        rows = self._budget.rows(x_TD.shape[0], self._top_k, 1, self._experts)
        plan = make_plan(
            topk_idx_TK, topk_prob_TK, first_expert=0, local_experts=self._experts, rows=rows
        )
        return Received(x_TD, plan, None)

    def combine(self, y_SD: Tensor, received: Received) -> Tensor:
        return _sum_experts(y_SD, received.plan)


class AllToAll:
    """Dense rank-major blocks [R, T, D] over gloo or NCCL; capturable in a CUDA graph.

    As every rank receives every token, dispatch is an all-gather, which moves the bytes of the
    dense all-to-all without a send buffer. Combine is the all-to-all back and a sum over ranks.
    Each is the other's backward. Collectives run on the current stream.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int, top_k: int, budget: Budget) -> None:
        self._group, self._top_k, self._budget = group, top_k, budget
        self._ranks = dist.get_world_size(group)
        self._local_experts = experts // self._ranks
        self._first_expert = dist.get_rank(group) * self._local_experts

    def dispatch(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Received:
        _check(x_TD, topk_idx_TK, topk_prob_TK, self._top_k)
        rows_ND, idx_NK, prob_NK = _Dispatch.apply(x_TD, topk_idx_TK, topk_prob_TK, self._group)
        rows = self._budget.rows(x_TD.shape[0], self._top_k, self._ranks, self._local_experts)
        plan = make_plan(
            idx_NK,
            prob_NK,
            first_expert=self._first_expert,
            local_experts=self._local_experts,
            rows=rows,
        )
        self._budget.observe(plan.needed, rows)
        return Received(rows_ND, plan, None)

    def combine(self, y_SD: Tensor, received: Received) -> Tensor:
        return _Return.apply(_sum_experts(y_SD, received.plan), self._group)


def make_dispatcher(
    name: str, *, group: dist.ProcessGroup | None, experts: int, top_k: int, budget: Budget
) -> Dispatcher:
    """The transport called `name` (`auto`, `local` or `alltoall`) over the expert-parallel `group`.

    `auto` is `local` on one rank and `alltoall` on several. No group means one rank.

    Raises:
        ValueError: unknown name, experts that do not divide over the ranks, top_k above experts,
            or a transport that cannot serve this group.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if experts % ranks:
        raise ValueError(
            f"{experts} experts do not divide over {ranks} ranks: set parallel.expert to a divisor"
        )
    if not 1 <= top_k <= experts:
        raise ValueError(f"model.moe.top_k={top_k} must be between 1 and the {experts} experts")
    if name == "auto":
        name = "local" if ranks == 1 else "alltoall"
    if name == "local":
        if ranks > 1:
            raise ValueError(
                f"parallel.dispatch=local serves one rank, but parallel.expert is {ranks}: "
                "set parallel.dispatch=alltoall or parallel.expert=1"
            )
        return Local(experts, top_k, budget)
    if name == "alltoall":
        if group is None:
            raise ValueError(
                "parallel.dispatch=alltoall needs an expert-parallel process group: "
                "set parallel.dispatch=local"
            )
        return AllToAll(group, experts, top_k, budget)
    raise ValueError(f"unknown parallel.dispatch={name}: set it to auto, local or alltoall")


def _check(x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor, top_k: int) -> None:
    check_routing(topk_idx_TK, topk_prob_TK)
    if x_TD.ndim != 2 or topk_idx_TK.shape != (x_TD.shape[0], top_k):
        raise ValueError(
            f"tokens {tuple(x_TD.shape)} do not fit expert ids {tuple(topk_idx_TK.shape)} "
            f"with top_k={top_k}"
        )


def _sum_experts(y_SD: Tensor, plan: Plan) -> Tensor:
    return combine_experts(
        y_SD, row_index_S=plan.row_index_S, offsets=plan.offsets, inverse_NK=plan.inverse_NK
    )


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks, rank-major: [T, ...] -> [R * T, ...]."""
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _sum_to_owner(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Block r goes to rank r, which sums what it receives: [R * T, ...] -> [T, ...].

    Summed after the exchange rather than by a reduce-scatter: fp32, one rounding, no ring order.
    """
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    blocks = received.view(dist.get_world_size(group), -1, *x.shape[1:])
    return blocks.sum(0, dtype=torch.float32).to(x.dtype)


class _Dispatch(torch.autograd.Function):
    """All-gather of tokens and routing; backward brings their gradients back to their rank."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, idx_TK: Tensor, prob_TK: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.group = group
        # One small collective instead of two: latency, not bytes, is what the routing costs.
        routing = _gather(torch.stack((idx_TK, prob_TK.view(torch.int32)), dim=1), group)
        idx_NK, prob_NK = routing[:, 0].contiguous(), routing[:, 1].contiguous().view(torch.float32)
        ctx.mark_non_differentiable(idx_NK)
        return _gather(x_TD, group), idx_NK, prob_NK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ND: Tensor, _: Tensor, grad_NK: Tensor
    ) -> tuple[Tensor | None, ...]:
        # needs_input_grad is the same on all ranks, hence so is the sequence of collectives.
        grad_TD = _sum_to_owner(grad_ND, ctx.group) if ctx.needs_input_grad[0] else None
        grad_TK = _sum_to_owner(grad_NK, ctx.group) if ctx.needs_input_grad[2] else None
        return grad_TD, None, grad_TK, None


class _Return(torch.autograd.Function):
    """Partial sums of all tokens back to their ranks, summed. Backward is the all-gather."""

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_to_owner(out_ND, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return _gather(grad_TD, ctx.group), None
