"""Checks and claim counters that the functions of this package share."""

import functools
from typing import Any

import cuda.bindings.driver as cuda
import torch
from torch import Tensor

from phalanx.kernels.sm90.jit.launch import check


def require(device: torch.device, **arguments: tuple[Tensor | None, torch.dtype, Any]) -> None:
    """`check` each argument, a triple of tensor, dtype and shape (None: any)."""
    for name, (tensor, dtype, shape) in arguments.items():
        check(device, name, tensor, dtype, shape)


def weight(name: str, w: Tensor) -> tuple[tuple[int, int, int], bool]:
    """Sizes of stacked weights [L, N, K], and True if they are the transpose of contiguous ones."""
    if w.ndim != 3:
        raise ValueError(f"{name} must be [L, N, K], not {list(w.shape)}")
    L, N, K = w.shape
    if not L or not N or not K or N % 64 or K % 64:
        raise ValueError(f"{name} is {[L, N, K]}: its matrices must be multiples of 64, not empty")
    return (L, N, K), not w.is_contiguous()


def counter_of(device: torch.device) -> Tensor:
    """A claim counter, int32 [1] and 0, for a kernel on the current stream.

    Kernels of a stream share one, as each leaves it at 0. A captured kernel gets its own: the
    stream of a graph, and what overlaps it, are unknown.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        return _CAPTURED.take(device, stream, _capture_on(stream))
    return _of_stream(device, stream)


class CaptureCounters:
    """Counters in the memory of the graph that is being captured, which zeroes them itself.

    They are allocated as needed and live as long as the graph. They come in blocks, one for each
    stream, whose kernels follow the one that zeroes it: a graph has one zeroing for hundreds of
    launches.
    """

    BLOCK = 512

    def __init__(self) -> None:
        self._capture = 0
        self._blocks: list[Tensor] = []
        """Blocks of this capture: memory dropped during a capture would be reused within it."""
        self._left: dict[int, list[Tensor]] = {}
        """Unused counters by stream."""

    def take(self, device: torch.device, stream: int, capture: int) -> Tensor:
        """The next counter, int32 [1].

        Args:
            stream: the current one. capture: number of the current capture; there is one at a time.
        """
        if capture != self._capture:
            self._capture, self._blocks, self._left = capture, [], {}
        if not self._left.get(stream):
            block = torch.zeros(self.BLOCK, dtype=torch.int32, device=device)
            self._blocks.append(block)
            self._left[stream] = list(block.split(1))
        return self._left[stream].pop()


_CAPTURED = CaptureCounters()


def _capture_on(stream: int) -> int:
    """Number of the capture that a stream is part of, unique in the process."""
    error, _, number, *_ = cuda.cuStreamGetCaptureInfo(cuda.CUstream(stream))
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cannot query the capture of a stream: {error.name}")
    return int(number)


@functools.cache
def _of_stream(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)
