"""Work that waits for exchanges of a backward pass, on gloo ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels import wgrad_queue
from phalanx.parallel.dispatcher.collectives import Collectives
from tests.support.distributed import run_distributed


class _Step(torch.autograd.Function):
    """The identity, whose backward pass calls a function with the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backward: Any) -> Tensor:
        ctx.call = backward
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call(grad)
        return grad, None


def _orders() -> list[str]:
    """Order of a backward pass that submits work and exchanges in a group of one and of all."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    done: list[str] = []

    def exchange(name: str, group: Any) -> Any:
        def call(grad: Tensor) -> None:
            with Collectives(lambda: group).during(grad) as taken:
                dist.all_reduce(grad, group=taken)
                done.append(name)

        return call

    x = torch.ones(2, requires_grad=True)
    y = _Step.apply(x, exchange("all", dist.group.WORLD))
    y = _Step.apply(y, exchange("alone", alone))
    y = _Step.apply(y, lambda _: wgrad_queue.submit(lambda: done.append("work")))
    with wgrad_queue.opened(wgrad_queue.Waiting(exchanges=True)):
        y.sum().backward()
    return done


@pytest.mark.dist
def test_work_waits_for_an_exchange_of_several_ranks() -> None:
    assert run_distributed(_orders, 2) == [["alone", "all", "work"]] * 2
