"""Overlap of the transposes of weight gradients' operands with the GEMM of a data gradient.

A transpose is bound by memory and a GEMM by tensor cores: with some SMs each they take less time
than one after the other on all, unless the GEMM is long and so at the power limit of the card
(docs/kernels/log.md). The GEMM leaves SMs free: its CTAs need an SM each, so the many small
programs of the transposes are placed on the others.
"""

import functools
import math
from collections.abc import Callable, Sequence

import torch

from phalanx.kernels.quantize.blocks import QuantizedColumns
from phalanx.kernels.sm90.jit.launch import sms
from phalanx.kernels.tracing import step

TRANSPOSED = 50e9  # bytes a second that an SM moves in transposes while memory is not the limit
MULTIPLIED = 7.5e12  # FLOP a second of an SM in a GEMM in FP8
LEAST = 1 / 9
"""Smallest share of the SMs for transposes: fewer would take power from the GEMM and save nothing,
so they run after it."""


def share(moved_bytes: int, flops: float, sms: int) -> int:
    """SMs for transposes, at most half, for about the same time of both; 0: after the GEMM."""
    transposes, gemm = moved_bytes / TRANSPOSED, flops / MULTIPLIED
    wanted = math.ceil(sms * transposes / (transposes + gemm))
    return 0 if wanted < LEAST * sms else min(wanted, sms // 2)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def overlap_transposes[T](
    gemm: Callable[[int], T],
    flops: float,
    transposes: Sequence[Callable[[], QuantizedColumns]],
    moved_bytes: int,
    device: torch.device,
) -> T:
    """Launch `gemm` on the current stream and transposes at the same time; returns its result.

    The current stream waits for the transposes. On a CPU one runs after the other.

    Args:
        gemm: takes the number of SMs that it leaves free.
        flops: floating-point operations of the GEMM.
        transposes: allocate nothing, as their stream's memory would be used on another.
        moved_bytes: bytes that the transposes read and write.
    """
    free = share(moved_bytes, flops, sms(device)) if device.type == "cuda" else 0
    if not free:
        result = gemm(0)
        for transpose in transposes:
            transpose()
        return result
    current, side = torch.cuda.current_stream(device), _stream(device)
    before_gemm = torch.cuda.Event()
    step(lambda: before_gemm.record(current))
    # The GEMM first: its CTAs take their SMs before the transposes' programs spread over all.
    result = gemm(free)
    step(lambda: side.wait_event(before_gemm))
    with torch.cuda.stream(side):
        for transpose in transposes:
            transpose()
    step(lambda: current.wait_stream(side))
    return result
