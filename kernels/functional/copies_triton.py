"""The kernels of `kernels.functional.copies`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 1024  # of a row, per program
_ELEMENTS = 4096  # per program


@triton.jit
def resize_row(rows, resized, D, N, CHANNELS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    x = tl.load(rows + row * D + channel, mask=channel < D, other=0)
    tl.store(resized + row * N + channel, x, mask=channel < N)


def resize(rows_SD: Tensor, channels: int) -> Tensor:
    """`kernels.functional.copies.resize_rows`."""
    S, D = rows_SD.shape
    out = rows_SD.new_empty(S, channels)
    # Units of eight bytes: of rows of odd sizes Triton would read elements one by one.
    size = rows_SD.itemsize
    whole = all(n * size % 8 == 0 for n in (D, channels, rows_SD.storage_offset()))
    unit = torch.int64 if whole else rows_SD.dtype
    from_SD, to_SN = rows_SD.view(unit), out.view(unit)
    D, N = from_SD.shape[1], to_SN.shape[1]
    block = min(_CHANNELS, triton.next_power_of_2(N))
    if out.numel():
        # Weights may be on another device than the current one, to which Triton would launch.
        with torch.cuda.device(rows_SD.device):
            resize_row[(S, triton.cdiv(N, block))](from_SD, to_SN, D, N, CHANNELS=block)
    return out


@triton.jit
def scaled_copy(x, factor, out, size, ELEMENTS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    value = tl.load(x + at, mask=at < size).to(tl.float32) * tl.load(factor)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < size)


def scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write x times a scalar to `out`; both are contiguous."""
    if size := x.numel():
        with torch.cuda.device(x.device):
            grid = (triton.cdiv(size, _ELEMENTS),)
            scaled_copy[grid](x, factor, out, size, ELEMENTS=_ELEMENTS)
