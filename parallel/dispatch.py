"""Dispatch and combine: tokens to the ranks of their experts, experts' sums back to their tokens.

The two ends of an MoE layer around the experts. Every transport delivers fixed rows: token t of
rank r of the expert-parallel group is received row r * T + t on every rank, so no host ever knows a
count and all shapes are static. T must be the same on all ranks of the group. Both directions are
differentiable and deterministic: contributions of ranks are summed in fp32 in an order that depends
on shapes alone.

Legend: T tokens per rank, D hidden, K slots for experts of a token, R ranks, N = R * T.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.plan import Plan, check_routing, make_plan
from parallel.overflow import Budget
from parallel.received import Received
from parallel.symm import Symm, SymmOptions, reason_against


class Dispatcher(Protocol):
    """A transport between tokens and experts. It keeps no state between calls."""

    def dispatch(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Received:
        """Bring tokens (bf16 or fp32), expert ids (int32) and probabilities (fp32) to experts.

        A slot without an expert has the id -1.
        """
        ...

    def combine(self, out_ND: Tensor, received: Received) -> Tensor:
        """Bring what a rank's experts made of received rows back, and add ranks up in fp32.

        Returns:
            [T, D] in out's dtype.
        """
        ...


@dataclass(frozen=True)
class Slots:
    """What a token's row of expert ids looks like, and how many expert rows follow from it."""

    top_k: int
    """Experts of a token on average."""
    width: int
    """Ids in the row: `top_k`, or more if some are -1."""
    surplus: int = 0
    """Rows by which a rank's choices of one expert may exceed those of top-k routing."""

    def most(self, tokens: int, ranks: int, local: int) -> int:
        """Expert rows that `local` experts can need at most for the tokens of all ranks."""
        chosen = tokens * min(self.top_k, local) + self.surplus * local
        return ranks * min(tokens * min(self.width, local), chosen)


class _Planner:
    """From received routing to the plan of this rank's experts, within the budget."""

    def __init__(
        self, slots: Slots, budget: Budget, backend: str, ranks: int, first: int, local: int
    ) -> None:
        self._slots, self._budget, self._backend = slots, budget, backend
        self._ranks, self._first, self._local = ranks, first, local

    def check(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> None:
        check_routing(topk_idx_TK, topk_prob_TK)
        if x_TD.ndim != 2 or topk_idx_TK.shape != (x_TD.shape[0], self._slots.width):
            raise ValueError(
                f"tokens {tuple(x_TD.shape)} do not fit expert ids {tuple(topk_idx_TK.shape)} "
                f"with {self._slots.width} slots for top_k={self._slots.top_k}"
            )

    def __call__(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor) -> Plan:
        tokens, slots = topk_idx_NK.shape[0] // self._ranks, self._slots
        most = slots.most(tokens, self._ranks, self._local)
        rows = self._budget.rows(tokens, slots.top_k, self._ranks, self._local, most=most)
        plan = make_plan(
            topk_idx_NK,
            topk_prob_NK,
            first_expert=self._first,
            local_experts=self._local,
            rows=rows,
            backend=self._backend,
        )
        if rows < most:
            self._budget.observe(plan.needed, rows)
        return plan


class Local:
    """All experts on this rank: nothing is copied."""

    def __init__(self, plan: _Planner) -> None:
        self._plan = plan

    def dispatch(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Received:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        return Received(x_TD, self._plan(topk_idx_TK, topk_prob_TK), None)

    def combine(self, out_ND: Tensor, received: Received) -> Tensor:
        return out_ND


class AllToAll:
    """Dense rank-major blocks [R, T, D] over gloo or NCCL; capturable in a CUDA graph.

    As every rank receives every token, dispatch is an all-gather, which moves the bytes of the
    dense all-to-all without a send buffer. Combine is the all-to-all back and a sum over ranks.
    Each is the other's backward. Collectives run on the current stream.
    """

    def __init__(self, group: dist.ProcessGroup, plan: _Planner) -> None:
        self._group, self._plan = group, plan

    def dispatch(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Received:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        rows_ND, idx_NK, prob_NK = _Dispatch.apply(x_TD, topk_idx_TK, topk_prob_TK, self._group)
        return Received(rows_ND, self._plan(idx_NK, prob_NK), None)

    def combine(self, out_ND: Tensor, received: Received) -> Tensor:
        return _Return.apply(out_ND, self._group)


def make_dispatcher(
    name: str,
    *,
    group: dist.ProcessGroup | None,
    experts: int,
    slots: Slots,
    budget: Budget,
    backend: str = "torch",
    dtype: torch.dtype = torch.bfloat16,
    symm: SymmOptions = SymmOptions(),  # noqa: B008  (frozen)
) -> Dispatcher:
    """The transport called `name` (of `auto`, `local`, `alltoall`, `symm`) over a `group`.

    Args:
        name: `auto` is `local` on one rank; on several `symm` where it can run, or `alltoall`.
        group: expert-parallel; None is one rank.
        experts: of all ranks.
        slots: of a token.
        budget: rows of the experts, shared by all layers.
        backend: of `kernels.plan`, which makes the plans.
        dtype: of tokens.
        symm: options of that transport.

    Raises:
        ValueError: unknown name, experts that do not divide over the ranks, top_k above experts,
            or a transport that cannot serve this group.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if experts % ranks:
        raise ValueError(
            f"{experts} experts do not divide over {ranks} ranks: set parallel.expert to a divisor"
        )
    if not 1 <= slots.top_k <= experts:
        raise ValueError(
            f"model.moe.top_k={slots.top_k} must be between 1 and the {experts} experts"
        )
    local = experts // ranks
    first = 0 if group is None else dist.get_rank(group) * local
    plan = _Planner(slots, budget, backend, ranks, first, local)
    against = reason_against(group, dtype) if name in ("auto", "symm") and ranks > 1 else ""
    if name == "auto":
        name = "local" if ranks == 1 else "alltoall" if against else "symm"
    if name == "local":
        if ranks > 1:
            raise ValueError(
                f"parallel.dispatch=local serves one rank, but parallel.expert is {ranks}: "
                "set parallel.dispatch=alltoall or parallel.expert=1"
            )
        return Local(plan)
    if name == "alltoall":
        if group is None:
            raise ValueError(
                "parallel.dispatch=alltoall needs an expert-parallel process group: "
                "set parallel.dispatch=local"
            )
        return AllToAll(group, plan)
    if name == "symm":
        if group is None or against:
            raise ValueError(
                f"parallel.dispatch=symm cannot run: {against or 'needs several ranks'}; "
                "set parallel.dispatch=auto"
            )
        return Symm(group, plan, local=local, options=symm)
    raise ValueError(f"unknown parallel.dispatch={name}: set it to auto, local, alltoall or symm")


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
