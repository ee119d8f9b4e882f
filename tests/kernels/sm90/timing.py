"""Time of a call on the GPU alone, without what the host needs to launch it."""

from collections.abc import Callable
from statistics import median

import torch


def microseconds(call: Callable[[], object], calls: int = 20, rounds: int = 11) -> float:
    """Median over `rounds` replays of a graph of `calls` successive calls; caches stay warm."""
    side = torch.cuda.Stream()  # what autograd keeps is not of the default stream
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return median(times)
