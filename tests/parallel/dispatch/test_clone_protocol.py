"""Memory of clones over `symm` needs no flags of its own, and the model of this can fail."""

from collections.abc import Callable

import pytest

from tests.parallel.dispatch.clone_protocol import Program, backward, explore, forward, way_back
from tests.parallel.dispatch.protocol import Violation


def stepped(ranks: int, overlaps: bool, keep: bool) -> Program:
    """Two steps of two layers, the second with two micro-batches under way and one evaluation."""
    p = Program(ranks, overlaps=overlaps)
    for micro_batches in (1, 2):
        for _ in range(2 * micro_batches):
            forward(p, overlaps=overlaps)
        for _ in range(2 * micro_batches):
            backward(p, keep=keep)
    forward(p, overlaps=overlaps)
    forward(p, overlaps=overlaps)
    return p


@pytest.mark.parametrize(("ranks", "runs"), [(2, 100), (3, 30), (4, 10)])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_no_order_of_events_breaks_it(overlaps: bool, keep: bool, ranks: int, runs: int) -> None:
    explore(stepped(ranks, overlaps, keep), runs)


def _without_a_way_out(p: Program) -> None:
    way_back(p, overlaps=True)
    way_back(p, overlaps=True)


def _without_gradients_of_sums(p: Program) -> None:
    for _ in range(2):
        backward(p, keep=True, meets=False)


def _without_a_signal(p: Program) -> None:
    backward(p, keep=True, signal=False)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_without_a_way_out, "writes rows that rank . still reads"),
        (_without_gradients_of_sums, "writes (gradients|rows) that rank . still reads"),
        (_without_a_signal, "reads gradients that rank . has not written"),
    ],
)
def test_what_orders_it_is_needed(broken: Callable[[Program], None], message: str) -> None:
    p = Program(2, overlaps=True)
    broken(p)
    with pytest.raises(Violation, match=message):
        explore(p, 300)
