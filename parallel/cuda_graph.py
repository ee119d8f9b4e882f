"""A whole training step, from tokens to reduced gradients, as one CUDA graph.

The first steps run eagerly, which compiles and loads every kernel and fills every cache; then the
step is captured once and replayed with new inputs. A replay does what the eager step does, bit for
bit: nothing in it is decided by the host, epochs and counters live on the device.

Capture asks for one stream: model, optimizer, first steps and the graph itself have to be on it,
since autograd and Megatron-Core's wrapper remember where they were made (`own_stream`).
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from phalanx.parallel.dispatch.exchange import begin_exchanges

Inputs = list[dict[str, Tensor]]
"""Of each micro-batch."""
WARM_STEPS = 2


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Work on a stream of its own, as captures need; on a CPU, nothing."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


class StepGraph:
    """Calls of `step`: eager at first, then replays of its graph.

    Args:
        step: from inputs on the device, which it leaves as they are, to a tensor of results there.
            Nothing else that it makes is looked at on the host; what it changes in place stays
            where it is.
    """

    def __init__(self, step: Callable[[Inputs], Tensor]) -> None:
        self._step = step
        self._warm = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Inputs = []
        self._result: Tensor | None = None

    def __call__(self, inputs: Inputs) -> Tensor:
        """Results of the step for `inputs`, whose shapes are those of the first call.

        The tensor is the graph's own: the next call overwrites it.
        """
        if self._graph is None and self._warm < WARM_STEPS:
            self._warm += 1
            return self._step(inputs)
        if self._graph is None:
            self._capture(inputs)
        for static, given in zip(self._inputs, inputs, strict=True):
            for name, tensor in static.items():
                tensor.copy_(given[name], non_blocking=True)
        assert self._graph is not None and self._result is not None
        self._graph.replay()
        return self._result

    def drop(self) -> None:
        """Forget the graph, as when sizes have changed: the next call is eager, then captured.

        Also before process groups are destroyed: NCCL waits for graphs that hold its collectives.
        """
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph, self._result, self._inputs = None, None, []
        self._warm = WARM_STEPS - 1
        gc.collect()
        torch.cuda.empty_cache()

    def _capture(self, inputs: Inputs) -> None:
        self._inputs = [
            {name: torch.empty_like(t) for name, t in given.items()} for given in inputs
        ]
        for static, given in zip(self._inputs, inputs, strict=True):
            for name, tensor in static.items():
                tensor.copy_(given[name])
        torch.cuda.synchronize()
        # Eager steps keep their memory for no one: the graph takes its own.
        gc.collect()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        # Other threads (checkpoints, watchdogs) may call CUDA meanwhile.
        with torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        ):
            begin_exchanges()
            self._result = self._step(self._inputs)
        self._graph = graph
