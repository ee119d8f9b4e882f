"""Transposes of operands of weight gradients beside the GEMM of a data gradient.

A transpose waits for memory and a GEMM for its tensor cores: with some SMs each they take less time
than one after the other with all, unless the GEMM is long and so at the power limit of the card
(docs/kernels/log.md). The GEMM leaves SMs free: its blocks need an SM each, and the many small
programs of the transposes are then placed where there is none of them.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch

from phalanx.kernels.quantize.blocks import QuantizedColumns
from phalanx.kernels.sm90.jit.launch import sms

TRANSPOSED = 50e9
"""Bytes a second that an SM reads and writes in transposes, while they are not bound by memory."""
MULTIPLIED = 7.5e12
"""FLOP a second of an SM in a GEMM in FP8."""
LEAST = 1 / 9
"""Of the SMs: transposes that would get fewer are made after the GEMM, as beside it they take power
from it and save nothing."""


def share(moved: int, flops: float, of: int) -> int:
    """SMs for transposes, so that both take about the same time; not more than half. 0: they are
    made after the GEMM.

    Args:
        moved: bytes that the transposes read and write.
        flops: of the GEMM.
        of: those of the device.
    """
    ours, theirs = moved / TRANSPOSED, flops / MULTIPLIED
    wanted = math.ceil(of * ours / (ours + theirs))
    return 0 if wanted < LEAST * of else min(wanted, of // 2)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def overlap_transposes[T](
    gemm: Callable[[int], T],
    flops: float,
    transposes: Sequence[Callable[[], QuantizedColumns]],
    moved: int,
    device: torch.device,
) -> T:
    """What `gemm` returns, launched on the current stream; transposes run at the same time, and are
    done for whatever is launched there next.

    Args:
        gemm: takes the number of SMs that it leaves free.
        flops: of it.
        transposes: allocate nothing, as their stream's memory would be used on another.
        moved: bytes that they read and write.
        device: a CPU's does one after the other, for stand-ins of the kernels.
    """
    free = share(moved, flops, sms(device)) if device.type == "cuda" else 0
    if not free:
        made = gemm(0)
        for transpose in transposes:
            transpose()
        return made
    here, there = torch.cuda.current_stream(device), _stream(device)
    begun = here.record_event()
    made = gemm(free)
    there.wait_event(begun)
    with torch.cuda.stream(there):
        for transpose in transposes:
            transpose()
    here.wait_stream(there)
    return made
