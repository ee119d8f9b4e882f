"""Devices as clocks: timestamps, cache flushes, CUDA graphs, and ranks that start together."""

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.connections import Connections

Call = Callable[[], object]
FLUSH_BYTES = 256 * 2**20
_HEAD_START_CYCLES = 200_000
"""About 0.1 ms in which the host gets ahead of the GPU, so that no late launch is timed."""


class Cpu:
    """A CPU process, alone or a rank, to try the benchmarks: eager calls, no cache to flush."""

    device = torch.device("cpu")

    def align_ranks(self) -> None:
        """Make this rank's stream wait for those of all other ranks."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def flush(self) -> None:
        self.align_ranks()

    def stamp(self) -> Any:
        return time.perf_counter()

    def between(self, begin: Any, end: Any) -> float:
        """Milliseconds between two stamps; only after `wait`."""
        return 1000 * float(end - begin)

    def wait(self) -> None: ...

    def capture(self, call: Call) -> Call:
        """Replays of a CUDA graph of the call."""
        return call

    def free(self) -> None:
        gc.collect()


class Gpu(Cpu):
    """The current CUDA device, of a process alone or, with the memory of its exchanges, of a rank.

    Ranks are aligned outside the timed region, and exchanges restart there, as in a step. Graphs of
    a rank share a memory pool: no result is read after the next capture.
    """

    def __init__(self, connections: Connections | None = None) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._connections = connections
        self._flush_buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)
        self._one = torch.zeros(1, device=self.device)
        self._capture_stream = torch.cuda.Stream()  # one for all: memory is cached per stream
        self._capture_options: dict[str, Any] = {}  # of captures, for torch.cuda.graph
        self._new_pool()

    def _new_pool(self) -> None:
        if self._connections is None:
            return
        # thread_local: other threads, such as NCCL's, may call CUDA during a capture.
        pool = torch.cuda.graph_pool_handle()
        self._capture_options = dict(pool=pool, capture_error_mode="thread_local")
        self._first = torch.cuda.CUDAGraph()  # keeps the pool alive: an empty pool is not reused
        with torch.cuda.graph(self._first, **self._capture_options):
            self._one.zero_()

    def align_ranks(self) -> None:
        if self._connections is not None and dist.get_world_size() > 1:
            dist.all_reduce(self._one)
            self._connections.begin()

    def flush(self) -> None:
        self._flush_buffer.zero_()
        if self._connections is not None:
            torch.cuda._sleep(_HEAD_START_CYCLES)
            self.align_ranks()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def capture(self, call: Call) -> Call:
        self.align_ranks()
        self._capture_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._capture_stream):
            call()
        torch.cuda.current_stream().wait_stream(self._capture_stream)
        torch.cuda.synchronize()
        self.align_ranks()
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, **self._capture_options):
                call()
        except Exception:
            torch.cuda.set_stream(before)
            # A failed capture leaves torch's generators in capture state, until the next one.
            with contextlib.suppress(Exception), torch.cuda.graph(torch.cuda.CUDAGraph()):
                self._flush_buffer[:1].zero_()
            self.align_ranks()  # like ranks whose capture succeeds and is replayed
            raise
        self.align_ranks()
        graph.replay()
        torch.cuda.synchronize()
        return graph.replay

    def free(self) -> None:
        gc.collect()  # graphs before the exchange memory that they use
        if self._connections is not None:
            torch.cuda.synchronize()
            dist.barrier()  # no rank still writes to this one's memory
            self._connections.release()
            self._first.reset()
            gc.collect()
        torch.cuda.empty_cache()
        self._new_pool()
