"""`quantize_weights` on an NVIDIA GPU, in Triton: both layouts in one read of W.

A program has one block, and its rows as `tiles_triton` has them.

Legend: L experts, O and I channels out and in, N = parts * L matrices of O / parts rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.quantize.blocks import BLOCK, QuantizedWeights
from phalanx.kernels.quantize.tiles_triton import (
    BIASED,
    chunk_amax,
    largest_of,
    powers,
    transposed,
)

_WARPS = 8


@triton.jit
def fp8_weights(  # type: ignore[no-untyped-def]
    w,
    data,
    across_data,
    scale,
    rows,
    outs,
    ins,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    QUARTER: tl.constexpr = BLOCK // 4
    program = tl.program_id(0)
    columns = tl.cdiv(ins, BLOCK)
    blocks = tl.cdiv(rows, BLOCK) * columns
    matrix = program // blocks
    of_matrix = program % blocks
    first_row = of_matrix // columns * BLOCK
    first_channel = of_matrix % columns * BLOCK
    first_out = matrix % PARTS * rows + first_row
    of_expert = (matrix // PARTS).to(tl.int64) * outs * ins

    row = 4 * tl.arange(0, QUARTER)
    i = tl.arange(0, BLOCK)
    channel = first_channel + i
    known = (channel < ins)[None, :]
    here0 = (first_row + row < rows)[:, None] & known
    here1 = (first_row + row + 1 < rows)[:, None] & known
    here2 = (first_row + row + 2 < rows)[:, None] & known
    here3 = (first_row + row + 3 < rows)[:, None] & known
    at = of_expert + (first_out + row).to(tl.int64)[:, None] * ins + channel[None, :]
    w0 = tl.load(w + at, mask=here0, other=0.0).to(tl.float32)
    w1 = tl.load(w + at + ins, mask=here1, other=0.0).to(tl.float32)
    w2 = tl.load(w + at + 2 * ins, mask=here2, other=0.0).to(tl.float32)
    w3 = tl.load(w + at + 3 * ins, mask=here3, other=0.0).to(tl.float32)
    amax = largest_of(chunk_amax(w0, 8), chunk_amax(w1, 8), chunk_amax(w2, 8), chunk_amax(w3, 8))
    up, down = powers(tl.max(amax), BIASED)
    tl.store(scale + program, down)
    fp8: tl.constexpr = data.dtype.element_ty
    w0 *= up
    w1 *= up
    w2 *= up
    w3 *= up
    tl.store(data + at, w0.to(fp8), mask=here0)
    tl.store(data + at + ins, w1.to(fp8), mask=here1)
    tl.store(data + at + 2 * ins, w2.to(fp8), mask=here2)
    tl.store(data + at + 3 * ins, w3.to(fp8), mask=here3)
    to = of_expert + channel.to(tl.int64)[:, None] * outs + (first_out + i)[None, :]
    here = (channel < ins)[:, None] & (first_row + i < rows)[None, :]
    tl.store(across_data + to, transposed(w0, w1, w2, w3, fp8), mask=here)


def quantize(w_LOI: Tensor, to: QuantizedWeights, parts: int) -> None:
    """Write both layouts and the scales; all tensors are contiguous, w is bf16 or fp32."""
    O, I = w_LOI.shape[1:]  # noqa: E741
    blocks = to.scale.numel()
    if not blocks:
        return
    fp8_weights[(blocks,)](
        w_LOI,
        *to,
        O // parts,
        O,
        I,
        PARTS=parts,
        BIASED=BIASED[to.data_LOI.dtype],
        BLOCK=BLOCK,
        num_warps=_WARPS,
    )
