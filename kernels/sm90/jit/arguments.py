"""Checks, claim counters and launches that the functions of this package share."""

import functools
from typing import Any

import cuda.bindings.driver as cuda
import torch
from torch import Tensor

from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.sm90.jit.launch import Kernel, check, launch, persistent_ctas


def require(device: torch.device, **arguments: tuple[Tensor | None, torch.dtype, Any]) -> None:
    """`check` each argument, a triple of tensor, dtype and shape (None: any)."""
    for name, (tensor, dtype, shape) in arguments.items():
        check(device, name, tensor, dtype, shape)


def launch_persistent(
    kernel: type[Kernel],
    config: Any,
    device: torch.device,
    options: LaunchOptions,
    counter: Tensor | None,
    /,
    **arguments: Any,
) -> None:
    """`launch` a kernel of one CTA an SM, which claims its tiles.

    Args:
        options: tell how many SMs are left free.
        counter: int32 [1], 0 before the call and after it; launches that may overlap must not share
            one. None: that of `counter_of`.
        arguments: arguments of the kernel but `counter` and `ctas`.
    """
    counter = counter_of(device) if counter is None else counter
    ctas = persistent_ctas(device, options)
    launch(kernel, config, **arguments, counter=counter, ctas=ctas)


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
