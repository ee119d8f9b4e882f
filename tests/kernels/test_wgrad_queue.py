"""The queue of weight gradients."""

from functools import partial

import pytest
import torch

from phalanx.kernels import wgrad_queue
from phalanx.kernels.expert_mlp import main_grad


def test_work_runs_at_once_without_a_queue() -> None:
    done: list[int] = []
    wgrad_queue.submit(lambda: done.append(1))
    wgrad_queue.run_all()
    assert done == [1]


@pytest.mark.parametrize("held", [0, 1, 2])
def test_order_and_passes_that_wait(held: int) -> None:
    done: list[int] = []
    with wgrad_queue.opened(held) as queue:
        for pass_ in range(4):
            for n in range(3):
                wgrad_queue.submit(partial(done.append, 3 * pass_ + n))
            queue.run_older()
            queue.run_older()  # a transfer after a forward pass
            assert done == list(range(3 * max(0, pass_ + 1 - held)))
        wgrad_queue.run_all()
    assert done == list(range(12))


def test_work_of_a_failed_step_is_dropped() -> None:
    done: list[int] = []
    with pytest.raises(ZeroDivisionError), wgrad_queue.opened(0):
        wgrad_queue.submit(lambda: done.append(1))
        raise ZeroDivisionError
    wgrad_queue.run_all()
    wgrad_queue.submit(lambda: done.append(2))
    assert done == [2]


def test_the_first_gradient_replaces_and_others_are_added() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.main_grad = torch.full((2,), 9.0)  # type: ignore[attr-defined]
    main_grad.replace_next([parameter])

    def compute(buffer: main_grad.Buffer) -> None:
        assert not torch.is_grad_enabled()
        one = torch.ones(2)
        buffer.out.copy_(buffer.out + one if buffer.add else one)

    with wgrad_queue.opened(0) as queue:
        for _ in range(2):
            main_grad.write(parameter, compute)
        assert parameter.main_grad.tolist() == [9, 9]
        queue.run_older()
    assert parameter.main_grad.tolist() == [2, 2]


def test_operands_are_freed_one_by_one() -> None:
    freed: list[int] = []

    class Operand:
        def __init__(self, n: int) -> None:
            self.n = n

        def __del__(self) -> None:
            freed.append(self.n)

    seen: list[int] = []
    with wgrad_queue.opened(0) as queue:
        for n in range(3):
            wgrad_queue.submit(partial(lambda operand: seen.append(len(freed)), Operand(n)))
        queue.run_older()
    assert seen == [0, 1, 2]
