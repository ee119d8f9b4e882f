"""Captured work: generators that it forks to, and updates, one graph per decision of the host."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from megatron.core.tensor_parallel import random as tracked

from phalanx.parallel import cuda_graph
from phalanx.parallel.cuda_graph import CaptureFailed, UpdateGraphs

pytestmark = pytest.mark.gpu


class Doubling:
    """value * factor (+ 1 with the decision), where the factor changes from call to call."""

    def __init__(self) -> None:
        self.value = torch.ones((), device="cuda")
        self.factor = torch.ones((), device="cuda")
        self.step = torch.cuda.CUDAGraph()
        """Graph whose pool the updates share, as long as it exists."""
        with torch.cuda.graph(self.step):
            self.factor.add_(0)
        self.pool = self.step.pool()
        self.calls, self.factors = 0, iter(range(2, 100))

    def prepare(self) -> None:
        self.factor.fill_(next(self.factors))

    def update(self, plus: bool, *, fails: bool = False) -> Callable[[], None]:
        def run() -> None:
            self.calls += 1
            if not torch.cuda.is_current_stream_capturing():
                self.prepare()
            self.value.mul_(self.factor)
            if plus:
                self.value.add_(1)
            if fails:
                self.value.item()

        return run


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Doubling:
    monkeypatch.setattr(cuda_graph, "gather", lambda value: [value])
    return Doubling()


def test_a_graph_for_each_decision_reads_new_numbers(work: Doubling) -> None:
    graphs, want = UpdateGraphs(), 1
    with cuda_graph.own_stream(torch.device("cuda")):
        for step, plus in enumerate([False, False, True, False, True, True, False]):
            graphs(plus, work.update(plus), work.prepare, work.pool)
            want = want * (step + 2) + plus
            assert work.value.item() == want
    # Each was called once eagerly and once to be captured.
    assert work.calls == 4
    graphs.drop()
    with cuda_graph.own_stream(torch.device("cuda")):
        graphs(False, work.update(False), work.prepare, work.pool)
    assert work.calls == 5 and work.value.item() == want * 9


def test_without_a_pool_updates_are_eager(work: Doubling) -> None:
    graphs = UpdateGraphs()
    for calls in range(1, 4):
        graphs(False, work.update(False), work.prepare, None)
        assert work.calls == calls


def test_what_cannot_be_captured_changes_nothing(work: Doubling) -> None:
    graphs = UpdateGraphs()
    with cuda_graph.own_stream(torch.device("cuda")):
        graphs(False, work.update(False), work.prepare, work.pool)
        with pytest.raises(CaptureFailed, match="test_cuda_graph_gpu") as caught:
            graphs(False, work.update(False, fails=True), work.prepare, work.pool)
    assert caught.value.work == "the update"
    assert work.value.item() == 2 and next(work.factors) == 3


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> tracked.CudaRNGStatesTracker:
    monkeypatch.setattr(cuda_graph, "gather", lambda value: [value])
    tracker = tracked.CudaRNGStatesTracker(use_cudagraphable_rng=True)
    monkeypatch.setattr(cuda_graph, "get_cuda_rng_tracker", lambda: tracker)
    tracker.add(tracked._MODEL_PARALLEL_RNG_TRACKER_NAME, 3)
    return tracker


def forked_draw(tracker: tracked.CudaRNGStatesTracker) -> torch.Tensor:
    with tracker.fork():
        return torch.rand(4, device="cuda")


def two_draws(tracker: tracked.CudaRNGStatesTracker) -> list[torch.Tensor]:
    """The next two draws, which are still to come afterwards."""
    states = {name: state.clone_state() for name, state in tracker.get_states().items()}
    draws = [forked_draw(tracker) for _ in range(2)]
    tracker.set_states(states)
    return draws


def test_a_graph_draws_from_the_generator_that_it_forks_to(
    tracker: tracked.CudaRNGStatesTracker,
) -> None:
    """As Transformer Engine's attention does in tensor parallelism, without dropout too."""
    want, draw = two_draws(tracker), partial(forked_draw, tracker)
    with cuda_graph.own_stream(torch.device("cuda")):
        graph, drawn = cuda_graph._captured(draw, torch.cuda.graph_pool_handle(), "a draw")
        for expected in want:
            graph.replay()
            assert torch.equal(drawn, expected)
    graph.reset()


def test_a_broken_capture_leaves_the_generators_that_it_forks_to(
    tracker: tracked.CudaRNGStatesTracker,
) -> None:
    want = two_draws(tracker)

    def broken() -> float:
        return forked_draw(tracker).sum().item()

    with cuda_graph.own_stream(torch.device("cuda")):
        with pytest.raises(CaptureFailed):
            cuda_graph._captured(broken, torch.cuda.graph_pool_handle(), "a draw")
        for expected in want:
            assert torch.equal(forked_draw(tracker), expected)
