"""`quantize_rows` on an NVIDIA GPU, in Triton: as fast as rows are read and written.

Blocks of all rows are numbered through, and a program has some that follow each other: whatever the
number of channels, its accesses are as long, and no thread is idle.

Legend: R rows, C channels, B blocks of a row.
"""

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.quantize.blocks import BLOCK, Quantized
from phalanx.kernels.quantize.tiles_triton import BIASED, powers

_BLOCKS = 64
"""Of a program."""
_WARPS = 8


@triton.jit
def fp8_rows(  # type: ignore[no-untyped-def]
    x,
    data,
    scale,
    blocks,
    width,
    x_row,
    data_row,
    scale_row,
    scale_block,
    PARTS: tl.constexpr,
    OF_PART: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = (number // (PARTS * OF_PART)).to(tl.int64)
    of_row = number % (PARTS * OF_PART)
    first = of_row % OF_PART * BLOCK
    channel = of_row // OF_PART * width + first
    i = tl.arange(0, BLOCK)
    here = (number < blocks)[:, None]
    if not WHOLE:
        here = here & (first[:, None] + i[None, :] < width)
    at = (row * x_row + channel)[:, None] + i[None, :]
    values = tl.load(x + at, mask=here, other=0.0).to(tl.float32)
    up, down = powers(tl.max(tl.abs(values), 1), BIASED)
    to = (row * data_row + channel)[:, None] + i[None, :]
    tl.store(data + to, (values * up[:, None]).to(data.dtype.element_ty), mask=here)
    tl.store(scale + row * scale_row + of_row * scale_block, down, mask=number < blocks)


def quantize(x_RC: Tensor, to: Quantized, parts: int) -> None:
    """Write data and scales.

    Args:
        x_RC: bf16 or fp32, contiguous channels.
        to: data with contiguous channels, scales of any strides.
    """
    R, width = x_RC.shape[0], x_RC.shape[1] // parts
    of_part = triton.cdiv(width, BLOCK)
    blocks = R * parts * of_part
    if not blocks:
        return
    fp8_rows[(triton.cdiv(blocks, _BLOCKS),)](
        x_RC,
        *to,
        blocks,
        width,
        x_RC.stride(0),
        to.data.stride(0),
        *to.scale.stride(),
        PARTS=parts,
        OF_PART=of_part,
        WHOLE=width % BLOCK == 0,
        BIASED=BIASED[to.data.dtype],
        BLOCKS=_BLOCKS,
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )
