"""Work between the calls of `hier` runs while rows are between nodes, in both passes."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.between_nodes.rows import Started
from phalanx.kernels import wgrad_queue
from tests.extras.between_nodes.test_hierarchical import made
from tests.parallel.dispatcher.test_base import EXPERTS, TOKENS, Case, experts, make_case
from tests.support.distributed import run_distributed


class Logged:
    """A rail that logs its starts and waits."""

    def __init__(self, rail: Any, log: list[str]) -> None:
        self._rail, self._log = rail, log

    def start(self, blocks: Tensor) -> Started:
        started: Started = self._rail.start(blocks)
        self._log.append("start")
        return started._replace(wait=lambda: self._log.append("wait"))


class Part(torch.autograd.Function):
    """A part of the shared experts, which logs its passes and its weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        log.append(name)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(f"{ctx.name}'")
        wgrad_queue.submit(partial(ctx.log.append, f"d{ctx.name}"))
        return 2 * grad, None, None


def order(case: Case) -> tuple[list[str], list[str]]:
    """Order of starts, waits and parts in a forward and in a backward pass."""
    rank, ranks, log = dist.get_rank(), dist.get_world_size(), list[str]()
    tokens, local = TOKENS // ranks, EXPERTS // ranks
    own_T, own_E = (slice(rank * n, (rank + 1) * n) for n in (tokens, local))
    dispatcher = made("hier")
    dispatcher._rail = Logged(dispatcher._rail, log)  # type: ignore[attr-defined]
    x, prob = (t[own_T].clone().requires_grad_() for t in (case.x_TD, case.prob_TK))
    sent = dispatcher.send_tokens(x, case.idx_TK[own_T], prob)
    assert not dispatcher.splits_shared_experts
    received = dispatcher.receive_tokens(sent)
    sums = dispatcher.send_sums(experts(received, case.w_EDD[own_E]), received, alone=False)
    half = Part.apply(x, log, "fc1")
    out = dispatcher.receive_sums(sums, received, [Part.apply(half, log, "fc2")])
    forward, log[:] = log.copy(), []
    with wgrad_queue.opened(wgrad_queue.Waiting(exchanges=True)):
        wgrad_queue.submit(partial(log.append, "before"))
        out.backward(case.dout_TD[own_T])
        wgrad_queue.submit(partial(log.append, "after"))
    return forward, log


@pytest.mark.dist
def test_shared_experts_compute_while_rows_are_between_nodes() -> None:
    forward, backward = run_distributed(order, 4, make_case("random", torch.float32))[0]
    routing, tokens, sums = ["start", "wait"], ["start", "wait"], ["start", "fc1", "fc2", "wait"]
    assert forward == [*routing, *tokens, *sums]
    # Gradients of sums, then those of tokens and of probabilities.
    shared = ["fc2'", "dfc2", "fc1'", "dfc1"]
    assert backward == ["start", "before", *shared, "wait", "start", "start", "wait", "wait"]
