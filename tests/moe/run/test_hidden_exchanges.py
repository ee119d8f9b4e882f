"""Weight gradients that wait for the next exchange of the backward pass: bits, and their order.

On a CPU nothing overlaps. Bits on two streams are compared by tests/end_to_end/layouts on GPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from phalanx.kernels import wgrad_queue
from tests.support.scheduling import mostly_slow
from tests.support.training import trained

pytestmark = pytest.mark.dist

RUN = [
    *["run.steps=2", "run.eval_interval=0", "parallel.expert=2", "kernels.backend=torch"],
    *["data.sequence_length=32", "data.micro_batch=1", "data.global_batch=4"],
    *["model.vocab_size=64", "model.hidden=32", "model.dense_ffn=48", "model.layers=2"],
    *["model.moe.ffn=16", "model.init_std=0.1"],
]
CASES: dict[str, tuple[int, list[str]]] = {
    "alltoall": (2, ["model=tiny", "parallel.dispatch=alltoall"]),
    "recomputed": (2, ["model=tiny_deepseek", "run.recompute=[moe,norm]"]),
    "fp8": (2, ["model=tiny", "precision=fp8_block", "model.hidden=128"]),
    "data parallel": (4, ["model=tiny", "parallel.overlap=true", "data.global_batch=8"]),
}


@mostly_slow("case", CASES, "recomputed")
def test_bits_are_the_same(case: str) -> None:
    check_bits(*CASES[case])


def check_bits(world: int, given: list[str]) -> None:
    """Compare steps whose weight gradients wait with those of steps whose gradients do not."""
    off, on = (
        trained(world, [*RUN, *given], {"parallel.delay_wgrad": delay}) for delay in ("off", "auto")
    )
    assert on.series("loss") == off.series("loss")
    assert on.series("grad_norm") == off.series("grad_norm")
    assert on.left == off.left
    assert all(torch.equal(on.after[key], off.after[key]) for key in off.after)


@contextmanager
def _order_checked(_: int) -> Iterator[None]:
    """Fail unless the gradients of experts follow the start of an exchange, or end the step."""
    from phalanx.kernels.expert_mlp import main_grad

    added, exchange, events = main_grad.added, dist.all_to_all_single, list[str]()

    def counted(parameter: torch.Tensor) -> None:
        assert wgrad_queue.waits_for_exchange()
        events.append("w")
        added(parameter)

    def exchanged(*given: Any, **named: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:
            events.append(">")
        return exchange(*given, **named)

    main_grad.added, dist.all_to_all_single = counted, exchanged
    try:
        yield
    finally:
        main_grad.added, dist.all_to_all_single = added, exchange
    steps = "".join(events)
    assert ">ww" in steps and not steps.startswith("w"), steps


def test_exchanges_start_first() -> None:
    world, given = CASES["alltoall"]
    trained(world, [*RUN, *given], {}, _order_checked)
