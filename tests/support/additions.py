"""Two activations and a transport that the package lacks, as a user would add them."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.activations import ACTIVATIONS, ActivationFacts
from phalanx.configs.transports import TRANSPORTS, TransportFacts
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.parallel.dispatcher.costs import GroupTopology, Links, TransportCosts
from phalanx.parallel.dispatcher.received import (
    OverlapFn,
    Planner,
    Received,
    SharedExpertFn,
    plus,
    run_overlap_fn,
)
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Dispatcher

# --- ReGLU, and ReLU without a gate (arXiv 2002.05202) --------------------------------------------


def relu(x: Tensor, act: Activation) -> Tensor:
    return x.relu()


def relu_slope(x: Tensor, act: Activation) -> Tensor:
    return (x > 0).to(x.dtype)


_FUNCTIONS = dict(
    value="tests.support.additions:relu",
    slope="tests.support.additions:relu_slope",
    cute="tests.kernels.sm90.relu:relu",
)
ADDED_ACTIVATIONS = {
    "reglu": ActivationFacts(True, "max(gate, 0) * up (arXiv 2002.05202)", **_FUNCTIONS),
    "relu": ActivationFacts(False, "max(h, 0), not gated", **_FUNCTIONS),
}

# --- every rank broadcasts all its rows -----------------------------------------------------------


class Broadcasts(Dispatcher):
    """One broadcast per rank, in dispatch and in combine."""

    no_overlap = "broadcasts are over when they return"

    def __init__(self, group: dist.ProcessGroup, plan: Planner) -> None:
        self._group, self._plan = group, plan

    @classmethod
    def build(cls, context: DispatchContext) -> "Broadcasts":
        return cls(context.group, context.plan)

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        rows = Links(reach.ranks - 1, 0)
        return TransportCosts(
            rows, 3 * rows, saved=reach.received, backward=5, buffers=2 * reach.received
        )

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        overlap_fn: OverlapFn = None,
    ) -> Received:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        rows_ND, prob_NK = (_Spread.apply(t, self._group) for t in (x_TD, topk_prob_TK))
        idx_NK = _all_rows(topk_idx_TK, self._group)
        run_overlap_fn(overlap_fn)
        return Received(rows_ND, self._plan(idx_NK, prob_NK))

    def combine(
        self,
        out_ND: Tensor,
        received: Received,
        shared_expert_fn: SharedExpertFn = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        return plus(_Collect.apply(out_ND, self._group), shared_expert_fn, residual_TD)


def _all_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows of all ranks in rank order."""
    parts = [x.contiguous() if r == group.rank() else torch.empty_like(x) for r in ranks(group)]
    for r, part in enumerate(parts):
        dist.broadcast(part, group=group, group_src=r)
    return torch.cat(parts)


def _sum_of_blocks(x_ND: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum in fp32 of this rank's blocks of all ranks' rows."""
    every = _all_rows(x_ND, group).unflatten(0, (group.size(), group.size(), -1))
    return every[:, group.rank()].sum(0, dtype=torch.float32).to(x_ND.dtype)


def ranks(group: dist.ProcessGroup) -> range:
    return range(group.size())


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_rows(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum_of_blocks(grad, ctx.group), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_of_blocks(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_rows(grad, ctx.group), None


ADDED_TRANSPORTS = {
    "broadcasts": TransportFacts(
        "tests.support.additions:Broadcasts", "a broadcast for each rank", auto=False
    )
}


@contextlib.contextmanager
def added(rank: int = 0) -> Iterator[None]:
    """Register them in the tables of this process."""
    with (
        mock.patch.dict(ACTIVATIONS, ADDED_ACTIVATIONS),
        mock.patch.dict(TRANSPORTS, ADDED_TRANSPORTS),
    ):
        yield
