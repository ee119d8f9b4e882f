"""Parts of layers that are recomputed or offloaded, on a GPU: in eager steps and in a graph."""

import pytest
import torch
from torch import Tensor

from phalanx.parallel.memory.layer_context import MemoryPlan, enter_layer

pytestmark = pytest.mark.gpu

LAYERS, TOKENS, WIDTH = 6, 4096, 2048
PIECE = 4 * TOKENS * WIDTH
PLANS = {
    "saved": MemoryPlan(),
    "recomputed": MemoryPlan(recompute=frozenset({"act"})),
    "offloaded": MemoryPlan(offload=frozenset({"act"})),
}


class Model(torch.nn.Module):
    """Layers of which each saves its input, and an activation that the plan is about."""

    def __init__(self, plan: MemoryPlan) -> None:
        super().__init__()
        g = torch.Generator("cuda").manual_seed(0)
        shape = (LAYERS, WIDTH, WIDTH)
        drawn = torch.randn(shape, device="cuda", generator=g) / WIDTH**0.5
        self.weights, self.plan = torch.nn.Parameter(drawn), plan

    def forward(self, x: Tensor) -> Tensor:
        for number, weight in enumerate(self.weights):
            with enter_layer(self.plan, number) as memory:
                a = memory.region("act", torch.sin, x)
                memory.offload("act", a)
                x = x + a @ weight
                memory.end(x)
        return x


def stepped(name: str, captured: bool) -> tuple[Tensor, Tensor, int]:
    """Gradients of weights and input, and the peak of memory on top of both."""
    torch.cuda.empty_cache()
    model = Model(PLANS[name])
    x = torch.randn(TOKENS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    x.requires_grad_()

    def step() -> None:
        model.weights.grad = x.grad = None
        model(x).square().mean().backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # model and x come from it
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
            for _ in range(20):
                graph.replay()
        else:
            for _ in range(20):
                step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    assert model.weights.grad is not None and x.grad is not None
    return model.weights.grad.clone(), x.grad.clone(), peak


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["recomputed", "offloaded"])
def test_the_same_bits_in_less_memory(name: str, captured: bool) -> None:
    *saved, most = stepped("saved", captured)
    *got, less = stepped(name, captured)
    assert all(torch.equal(a, b) for a, b in zip(got, saved, strict=True))
    resident = 2 if name == "offloaded" else 1  # layers whose activation is in memory at once
    assert most - less >= (LAYERS - resident - 1) * PIECE
