"""What the functions of this package have in common: argument types, checks, claim counters."""

import functools
from typing import Any

import cutlass
import torch
from torch import Tensor

from kernels.sm90.launch import check

BF16 = (cutlass.BFloat16, 16)
WORD = (cutlass.Uint32, 4)
FP32 = (cutlass.Float32, 4)
INT = (cutlass.Int32, 4)
LONG = (cutlass.Int64, 8)
"""Element and alignment of pointer arguments; a word is two bf16."""

_CAPTURED = 8192


def require(device: torch.device, **arguments: tuple[Tensor | None, torch.dtype, Any]) -> None:
    """`check` of each argument, given as tensor, dtype and shape (None: any)."""
    for name, (tensor, dtype, shape) in arguments.items():
        check(device, name, tensor, dtype, shape)


def weight(name: str, w: Tensor) -> tuple[tuple[int, int, int], bool]:
    """Sizes of stacked weights [L, N, K], and whether they are the transpose of contiguous ones."""
    if w.ndim != 3:
        raise ValueError(f"{name} must be [L, N, K], not {list(w.shape)}")
    L, N, K = w.shape
    if not L or not N or not K or N % 64 or K % 64:
        raise ValueError(f"{name} is {[L, N, K]}: its matrices must be multiples of 64, not empty")
    return (L, N, K), not w.is_contiguous()


def counter_of(device: torch.device) -> Tensor:
    """A claim counter, int32 [1] and 0, for a kernel on the current stream.

    Kernels of a stream share one, as each leaves it at 0. A captured kernel gets one for itself,
    since nobody knows on which stream, and beside what, its graph will run.
    """
    made = _for_captures()
    if torch.cuda.is_current_stream_capturing():
        if made.get(device):
            return made[device].pop()
        return torch.zeros(1, dtype=torch.int32, device=device)  # the graph zeroes it
    if device not in made:
        made[device] = list(torch.zeros(_CAPTURED, dtype=torch.int32, device=device).split(1))
    return _of_stream(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _of_stream(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


@functools.cache
def _for_captures() -> dict[torch.device, list[Tensor]]:
    """Counters that no graph has yet; made outside of captures, as a graph would only zero its."""
    return {}
