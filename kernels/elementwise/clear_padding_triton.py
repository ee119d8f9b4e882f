"""`kernels.elementwise.clear_padding` on an NVIDIA GPU, in Triton.

Legend: S rows, D channels, L experts.
"""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16  # rows per program
_CHANNELS = 512  # channels that a program writes at a time


@triton.jit
def clear_rows(  # type: ignore[no-untyped-def]
    rows,
    offsets,
    S,
    D,
    L,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    used = tl.load(offsets + L)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if used < (tl.program_id(0) + 1) * ROWS:
        at = rows + row.to(tl.int64)[:, None] * D
        clear = ((row >= used) & (row < S))[:, None]
        for first in range(0, D, CHANNELS):
            channel = first + tl.arange(0, CHANNELS)[None, :]
            tl.store(at + channel, 0.0, mask=clear & (channel < D))


def clear(rows_SD: Tensor, offsets: Tensor) -> None:
    """Set rows from offsets[L] on to 0."""
    S, D = rows_SD.shape
    if rows_SD.numel():
        sizes = dict(ROWS=_ROWS, CHANNELS=_CHANNELS)
        clear_rows[(triton.cdiv(S, _ROWS),)](rows_SD, offsets, S, D, offsets.numel() - 1, **sizes)
