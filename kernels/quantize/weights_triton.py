"""`quantize_weights` on an NVIDIA GPU, in Triton: both layouts, or one, in one read of W.

A program has one block, with its rows arranged as in `tiles_triton`.

Legend: L experts, O and I channels out and in, N = parts * L matrices of O / parts rows.
"""

# Tuples of tiles grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.quantize.blocks import BLOCK
from phalanx.kernels.quantize.tiles_triton import (
    BIASED,
    chunk_amax,
    powers,
    transposed,
)

_TURNS = 4
_WARPS = 8
_REGISTERS = {torch.bfloat16: 80, torch.float32: 104}
"""Registers of a thread: 3 programs fit on an SM, or 2."""


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
    FP8: tl.constexpr,
    BIASED: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.cdiv(ins, BLOCK)
    blocks = tl.cdiv(rows, BLOCK) * columns
    matrix = program // blocks
    of_matrix = program % blocks
    first_row = of_matrix // columns * BLOCK
    first_channel = of_matrix % columns * BLOCK
    first_out = matrix % PARTS * rows + first_row
    of_expert = (matrix // PARTS).to(tl.int64) * outs * ins
    corner = of_expert + first_out.to(tl.int64) * ins + first_channel

    row = TURNS * tl.arange(0, BLOCK // TURNS)
    i = tl.arange(0, BLOCK)
    known = first_channel + i < ins
    at = row[:, None] * ins + i[None, :]
    values = ()
    amax = tl.zeros([BLOCK // TURNS, BLOCK // 8], tl.float32)
    for k in tl.static_range(TURNS):
        here = (first_row + row + k < rows)[:, None] & known[None, :]
        x = tl.load(w + corner + k * ins + at, mask=here, other=0.0).to(tl.float32)
        values = values + (x,)
        amax = tl.maximum(amax, chunk_amax(x, 8))
    up, down = powers(tl.max(amax), BIASED)
    tl.store(scale + program, down)
    made = ()
    for k in tl.static_range(TURNS):
        here = (first_row + row + k < rows)[:, None] & known[None, :]
        made = made + (values[k] * up,)
        if data is not None:
            tl.store(data + corner + k * ins + at, made[k].to(FP8), mask=here)
    if across_data is not None:
        across_data += of_expert + first_channel.to(tl.int64) * outs + first_out
        to = i[:, None] * outs + i[None, :]
        here = known[:, None] & (first_row + i < rows)[None, :]
        tl.store(across_data + to, transposed(made, FP8), mask=here)


def quantize(
    w_LOI: Tensor, data_LOI: Tensor | None, data_LIO: Tensor | None, scale: Tensor, parts: int
) -> None:
    """Write one layout or both in e4m3, and the scales.

    All tensors are contiguous, w is bf16 or fp32.
    """
    O, I = w_LOI.shape[1:]  # noqa: E741
    blocks = scale.numel()
    if not blocks:
        return
    fp8_weights[(blocks,)](
        w_LOI,
        data_LOI,
        data_LIO,
        scale,
        O // parts,
        O,
        I,
        PARTS=parts,
        FP8=tl.float8e4nv,
        BIASED=BIASED[torch.float8_e4m3fn],
        TURNS=_TURNS,
        BLOCK=BLOCK,
        num_warps=_WARPS,
        maxnreg=_REGISTERS[w_LOI.dtype],
    )
