"""The queue of weight gradients."""

from functools import partial

import pytest
import torch

from phalanx.kernels import wgrad_queue
from phalanx.kernels.expert_mlp import main_grad
from phalanx.kernels.wgrad_queue import Waiting


def test_work_runs_at_once_without_a_queue() -> None:
    done: list[int] = []
    wgrad_queue.submit(lambda: done.append(1))
    wgrad_queue.run_all()
    assert done == [1]


@pytest.mark.parametrize("held", [0, 1, 2])
def test_order_and_passes_that_wait(held: int) -> None:
    done: list[int] = []
    with wgrad_queue.opened(Waiting(held)) as queue:
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
    with pytest.raises(ZeroDivisionError), wgrad_queue.opened(Waiting(0)):
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

    with wgrad_queue.opened(Waiting(0)) as queue:
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
    with wgrad_queue.opened(Waiting(0)) as queue:
        for n in range(3):
            wgrad_queue.submit(partial(lambda operand: seen.append(len(freed)), Operand(n)))
        queue.run_older()
    assert seen == [0, 1, 2]


class Paired:
    """Work for some parameters that notes its passes."""

    def __init__(self, done: list[str], name: str, parameters: list[torch.Tensor]) -> None:
        self.done, self.name, self.parameters = done, name, parameters

    def __call__(self) -> None:
        self.done.append(self.name)

    def run_with(self, later: "Paired") -> None:
        self.done.append(f"{self.name}+{later.name}")


def submitted(passes: int, queue: wgrad_queue.WgradQueue, ends: bool) -> list[str]:
    """Names of the work that runs in passes of two layers, each with two parameters.

    Args:
        ends: the last pass submits the reduction of each parameter.
    """
    done: list[str] = []
    layers = [[torch.zeros(1), torch.zeros(1)] for _ in range(2)]
    for pass_ in range(passes):
        for layer, parameters in enumerate(layers):
            wgrad_queue.submit(partial(done.append, f"dense{pass_}"))
            wgrad_queue.submit_paired(Paired(done, f"{layer}.{pass_}", parameters))
            if ends and pass_ == passes - 1:
                for n, parameter in enumerate(parameters):
                    reduce = partial(done.append, f"reduce{layer}.{n}")
                    wgrad_queue.submit(reduce, follows=[parameter])
        queue.run_older()
    wgrad_queue.run_all()
    return done


@pytest.mark.parametrize("held", [None, 0, 1])
@pytest.mark.parametrize("passes", [1, 2, 3, 4])
def test_work_of_two_passes_runs_together(passes: int, held: int | None) -> None:
    """Work without a partner runs alone, before what follows it; all else keeps its order."""
    with wgrad_queue.opened(Waiting(held, pairs=True)) as queue:
        done = submitted(passes, queue, ends=True)
    pairs = [f"{layer}.{n}+{layer}.{n + 1}" for n in range(0, passes - 1, 2) for layer in range(2)]
    alone = [f"{layer}.{passes - 1}" for layer in range(2) if passes % 2]
    assert [work for work in done if work[0] in "01"] == pairs + alone
    assert [work for work in done if work.startswith("dense")] == [
        f"dense{n}" for n in range(passes) for _ in range(2)
    ]
    for layer, last in enumerate((pairs + alone)[-2:]):
        for n in range(2):
            assert done.index(last) < done.index(f"reduce{layer}.{n}")


@pytest.mark.parametrize("held", [None, 0, 1])
def test_left_over_work_runs_at_the_end(held: int | None) -> None:
    with wgrad_queue.opened(Waiting(held, pairs=True)) as queue:
        done = submitted(3, queue, ends=False)
    assert done[-2:] == ["0.2", "1.2"] and "0.0+0.1" in done


def test_work_runs_alone_without_pairs() -> None:
    alone = ["0.0", "1.0", "0.1", "1.1"]
    with wgrad_queue.opened(Waiting(0)) as queue:
        delayed = submitted(2, queue, ends=False)
    done: list[str] = []
    for pass_ in range(2):
        for layer in range(2):
            wgrad_queue.submit_paired(Paired(done, f"{layer}.{pass_}", [torch.zeros(1)]))
    assert done == [work for work in delayed if work[0] in "01"] == alone


def test_work_waits_for_the_next_exchange() -> None:
    """Work with a partner too, and all that follows it."""
    done: list[str] = []
    parameters = [torch.zeros(1)]
    with wgrad_queue.opened(Waiting(exchanges=True, pairs=True)):
        for pass_ in range(2):
            assert wgrad_queue.waits_for_exchange()
            wgrad_queue.submit(partial(done.append, f"dense{pass_}"))
            wgrad_queue.submit_paired(Paired(done, f"{pass_}", parameters))
            assert len(done) == pass_
            wgrad_queue.run_beside_exchange()
            assert done[pass_] == f"dense{pass_}"
    assert done == ["dense0", "dense1", "0+1"]
    with wgrad_queue.opened(Waiting(0)):
        wgrad_queue.submit(partial(done.append, "waits"))
        wgrad_queue.run_beside_exchange()
        assert done[-1] == "0+1" and not wgrad_queue.waits_for_exchange()


def test_work_submitted_while_an_exchange_is_in_flight_runs_at_once() -> None:
    """Also between the ends of two exchanges that are in flight; then work waits again."""
    done: list[str] = []
    submit = lambda name: wgrad_queue.submit(partial(done.append, name))  # noqa: E731
    with wgrad_queue.opened(Waiting(exchanges=True)):
        submit("before")
        wgrad_queue.begin_exchange()
        assert done == ["before"]
        wgrad_queue.begin_exchange()
        wgrad_queue.end_exchange()
        submit("beside")
        assert done == ["before", "beside"]
        wgrad_queue.end_exchange()
        submit("after")
        assert done == ["before", "beside"]
        wgrad_queue.begin_exchange()
    assert done == ["before", "beside", "after"]


def test_only_work_for_transfers_and_exchanges_is_delayed() -> None:
    assert not wgrad_queue.delays()
    with wgrad_queue.opened(Waiting(pairs=True)):
        assert not wgrad_queue.delays()
    for waiting in (Waiting(0, pairs=True), Waiting(exchanges=True)):
        with wgrad_queue.opened(waiting):
            assert wgrad_queue.delays()
