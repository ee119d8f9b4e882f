"""A training step as two CUDA graphs: from tokens to reduced gradients, and the update.

Between them the host reads the totals of the step and decides whether there is an update. The first
steps run eagerly, which compiles every kernel and fills every cache; then the step is captured once
and replayed with new inputs, bit for bit as an eager one: epochs and counters live on the device.

Capture asks for one stream (`own_stream`): model, optimizer, first steps and the graph have to be
on it, since autograd and Megatron-Core's wrapper remember where they were made. Passes on other
streams are branches that begin and end there.
"""

import gc
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from phalanx.configs.capture import WARM_STEPS
from phalanx.parallel.fault.agreement import gather

Inputs = list[dict[str, Tensor]]  # tensors of each micro-batch, by name


class CaptureFailed(RuntimeError):
    """A step or an update (`work`) cannot be captured, and nothing of it was computed.

    Raised on all ranks alike, with the first failing rank's error and its line of code.
    """

    def __init__(self, reason: str, work: str = "the step") -> None:
        super().__init__(reason)
        self.work = work


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
        begin: called before a captured step, as part of its graph, and after a failed capture.
    """

    def __init__(self, step: Callable[[Inputs], Tensor], begin: Callable[[], None]) -> None:
        self._step, self._begin = step, begin
        self._warm = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: Inputs = []
        self._result: Tensor | None = None

    @property
    def count(self) -> int:
        return int(self._graph is not None)

    @property
    def micro_batches(self) -> int:
        return len(self._inputs)

    def __call__(self, inputs: Inputs) -> Tensor:
        """Results of the step for `inputs`, whose shapes are those of the first call.

        The tensor is the graph's own: the next call overwrites it. Raises `CaptureFailed` on all
        ranks.
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

    @property
    def pool(self) -> Any:
        return None if self._graph is None else self._graph.pool()

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

        def step() -> Tensor:
            self._begin()
            return self._step(self._inputs)

        try:
            pool = torch.cuda.graph_pool_handle()
            self._graph, self._result = _captured(step, pool, "the step")
        except CaptureFailed:
            self._inputs = []
            self._begin()  # captured ones have taken turns at the buffers, but sent nothing
            gc.collect()
            torch.cuda.empty_cache()
            raise


class UpdateGraphs:
    """Calls of the update that follows a captured step, replayed from a graph for each decision.

    They share the memory pool of the step's graph, since they never run at the same time.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._seen: set[Hashable] = set()

    @property
    def count(self) -> int:
        return len(self._graphs)

    def __call__(
        self,
        decision: Hashable,
        update: Callable[[], None],
        prepare: Callable[[], None],
        pool: Any,
    ) -> None:
        """Update eagerly the first time, which compiles; later by a graph.

        Args:
            decision: what the host decides in the update, but its numbers.
            update: changes tensors in place; calls `prepare`, but not while it is captured.
            prepare: brings the numbers of this update to the device.
            pool: of the graph of the step, from which gradients come; None: an eager update.
        """
        if pool is None or decision not in self._seen:
            self._seen.add(decision)
            update()
            return
        if decision not in self._graphs:
            self._graphs[decision], _ = _captured(update, pool, "the update")
        prepare()
        self._graphs[decision].replay()

    def drop(self) -> None:
        """Forget the graphs, as before process groups are destroyed or when tensors have moved."""
        if self._graphs:
            torch.cuda.synchronize()
        for graph in self._graphs.values():
            graph.reset()
        self._graphs = {}


def _captured[Result](
    work: Callable[[], Result], pool: Any, name: str
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Graph of `work`, called `name` in errors, on the current stream, and its result."""
    graph, result, error = _attempted(work, pool)
    if isinstance(error, torch.OutOfMemoryError):
        raise error  # which nothing eager would spare
    # A rank that replays would wait for one that does not.
    reasons = gather(None if error is None else _reason(error))
    if failing := [rank for rank, reason in enumerate(reasons) if reason is not None]:
        del result
        graph.reset()
        text = str(reasons[failing[0]])
        raise CaptureFailed(text if failing == [0] else f"{text} (rank {failing[0]})", name)
    return graph, cast(Result, result)


def _attempted[Result](
    work: Callable[[], Result], pool: Any
) -> tuple[torch.cuda.CUDAGraph, Result | None, Exception | None]:
    graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    # Megatron-Core forks to these where ranks of a tensor group might draw. Transformer Engine's
    # attention advances whichever is current, with no dropout too.
    tracker = get_cuda_rng_tracker()
    forked = tracker.get_states()
    for other in forked.values():
        graph.register_generator_state(other)
    state = generator.clone_state()
    forked_states = {name: other.clone_state() for name, other in forked.items()}
    result, failure = None, None
    # Other threads (checkpoints, watchdogs) may call CUDA meanwhile.
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        result = work()
    except Exception as error:
        failure = error
    try:
        graph.capture_end()
    except Exception as error:  # as after an error that broke the capture
        failure = failure or error
        # torch leaves the allocator and the generators as in a capture: memory that another stream
        # used would never be free again, and nothing could be drawn.
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
        generator.graphsafe_set_state(state)
        tracker.set_states(forked_states)
    return graph, result, failure


def _reason(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first} ({Path(frame.filename).name}:{frame.lineno})"
