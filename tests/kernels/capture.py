"""Comparison of a captured step with an eager one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Step = Callable[[], Sequence[Tensor]]


def check_replay(step: Step, leaf: Tensor, new: Tensor) -> None:
    """Check that a captured step replayed with other values equals an eager step bitwise."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaf.copy_(new)
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)
