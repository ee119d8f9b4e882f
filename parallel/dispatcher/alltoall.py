"""Transport `alltoall`: dense blocks by collectives, of gloo or NCCL; capturable in a CUDA graph.

Every rank receives every token, so dispatch is an all-gather: the bytes of the dense all-to-all
without a send buffer. Combine is the all-to-all and a sum over ranks. Each is the backward of the
other. The current stream waits for each collective.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.elementwise.sums import block_sum
from phalanx.kernels.limits import Refusal
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.dispatcher.collectives import Collectives
from phalanx.parallel.dispatcher.costs import GroupTopology, Links, TransportCosts
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows
from phalanx.parallel.dispatcher.transport_class import (
    DispatchContext,
    Dispatcher,
    Planner,
    Rank,
    Received,
)


class AllToAll(Dispatcher):
    """The transport `alltoall`; `parallel.dispatcher.base` states the contract.

    With a `recipe` rows travel in FP8.
    """

    no_overlap = "alltoall cannot overlap: it is over when it returns"

    def __init__(self, ranks: Collectives, plan: Planner, recipe: Fp8Block | None = None) -> None:
        self._ranks, self._plan, self._recipe = ranks, plan, recipe

    @classmethod
    def build(cls, context: DispatchContext) -> "AllToAll":
        return cls(context.collectives(context.group), context.plan, context.recipe)

    @classmethod
    def refuse(cls, ranks: Sequence[Rank]) -> Refusal:
        return None  # it runs everywhere

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        """Rows of an all-gather on the way out, and of an all-to-all on the way back.

        In the former a row enters a node once; in the latter each rank of a node sends its own sum.
        """
        ranks, nodes, size = reach.ranks, reach.nodes, reach.node_ranks
        there, back = Links(ranks - nodes, nodes - 1), Links(size - 1, ranks - size)
        return TransportCosts(
            there, reach.rows_back * back, saved=reach.received, backward=reach.received
        )

    def send_tokens(
        self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor, fp8: FP8Rows | None = None
    ) -> Any:
        """Gather tokens; with `fp8` in its format, in which they may have come over a rail."""
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        if fp8 is None and self._recipe is not None:
            fp8 = FP8Rows(self._recipe)
        return self._start(x_TD, topk_idx_TK, topk_prob_TK, fp8)

    def _start(self, x_TD: Tensor, idx_TK: Tensor, prob_TK: Tensor, fp8: FP8Rows | None) -> Any:
        return *spread(x_TD, idx_TK, prob_TK, self._ranks, fp8), fp8

    def receive_tokens(self, sent: Any) -> Received:
        rows_ND, idx_NK, prob_NK, fp8 = sent
        fp8_inputs = None if fp8 is None else fp8.fp8_inputs
        plan = self._plan(idx_NK, prob_NK)
        return Received(rows_ND, plan, fp8_inputs=fp8_inputs, route=fp8, inputs_persist=True)

    def receive_sums(
        self, sent: Tensor, received: Received, addends: Sequence[Tensor] = ()
    ) -> Tensor:
        return collect(sent, self._ranks, addends, received.route)


def spread(
    x_TD: Tensor, idx_TK: Tensor, prob_TK: Tensor, ranks: Collectives, fp8: FP8Rows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """All-gather tokens and routing of a group, rank-major: rows_ND, idx_NK and prob_NK.

    Gradients return to their ranks and are summed there in fp32. With `fp8` the rows are in
    `fp8.fp8_inputs`.
    """
    rows_ND, idx_NK, prob_NK = _Spread.apply(x_TD, idx_TK, prob_TK, ranks, fp8)
    return rows_ND, idx_NK, prob_NK


def collect(
    out_ND: Tensor, ranks: Collectives, more: Sequence[Tensor] = (), fp8: FP8Rows | None = None
) -> Tensor:
    """Return rank-major partial sums to the ranks of their tokens: out_TD.

    They are summed there in fp32, with `more` addends [T, D]. The gradient travels in `fp8`, if
    any.
    """
    return _Collect.apply(out_ND, ranks, fp8, *more)


def all_routing(idx_TK: Tensor, prob_TK: Tensor, ranks: Collectives) -> tuple[Tensor, Tensor]:
    """Routing of all ranks, rank-major: idx_NK and prob_NK."""
    # One small collective instead of two: latency, not bytes, is what the routing costs.
    routing = all_rows(torch.stack((idx_TK, prob_TK.view(torch.int32)), dim=1), ranks)
    return routing[:, 0].contiguous(), routing[:, 1].contiguous().view(torch.float32)


def all_rows(x: Tensor, ranks: Collectives) -> Tensor:
    """Rows of all ranks, rank-major: [T, ...] -> [R * T, ...]."""
    x = x.contiguous()
    if ranks.size == 1:  # inside a node of `hier` with one rank: nothing to copy
        return x
    out = x.new_empty(ranks.size * x.shape[0], *x.shape[1:])
    with ranks.during(x, spreads=True) as group:
        dist.all_gather_into_tensor(out, x, group=group)
    return out


def sum_to_owner(x: Tensor, ranks: Collectives, addends: Sequence[Tensor] = ()) -> Tensor:
    """Block r goes to rank r, which sums what it receives: [R * T, ...] -> [T, ...].

    Summed after the exchange rather than by a reduce-scatter: fp32, one rounding, the ranks' order.
    """
    x = x.contiguous()
    received = x
    if ranks.size > 1:
        received = torch.empty_like(x)
        with ranks.during(x) as group:
            dist.all_to_all_single(received, x, group=group)
    return block_sum(received.unflatten(0, (ranks.size, -1)), addends)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        idx_TK: Tensor,
        prob_TK: Tensor,
        ranks: Collectives,
        fp8: FP8Rows | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.ranks = ranks
        idx_NK, prob_NK = all_routing(idx_TK, prob_TK, ranks)
        ctx.mark_non_differentiable(idx_NK)
        gather = partial(all_rows, ranks=ranks)
        rows_ND = gather(x_TD) if fp8 is None else fp8.bring_tokens(x_TD, gather)
        return rows_ND, idx_NK, prob_NK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ND: Tensor, _: Tensor, grad_NK: Tensor
    ) -> tuple[Tensor | None, ...]:
        # needs_input_grad is the same on all ranks, hence so is the sequence of collectives.
        grad_TD = sum_to_owner(grad_ND, ctx.ranks) if ctx.needs_input_grad[0] else None
        grad_TK = sum_to_owner(grad_NK, ctx.ranks) if ctx.needs_input_grad[2] else None
        return grad_TD, None, grad_TK, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out_ND: Tensor, ranks: Collectives, fp8: FP8Rows | None, *addends: Tensor
    ) -> Tensor:
        ctx.ranks, ctx.fp8, ctx.addends = ranks, fp8, len(addends)
        return sum_to_owner(out_ND, ranks, addends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        gather = partial(all_rows, ranks=ctx.ranks)
        fp8: FP8Rows | None = ctx.fp8
        grad_ND = gather(grad_TD) if fp8 is None else fp8.bring_gradient(grad_TD, gather)
        return grad_ND, None, None, *[grad_TD] * ctx.addends
