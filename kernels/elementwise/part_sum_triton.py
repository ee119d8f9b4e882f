"""Sums of partial results of another kernel's programs, in an order that depends only on shapes.

The second step of a sum without atomics: each program of the first kernel writes a row.

Legend: P programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS, _COLUMNS = 256, 8  # rows and columns that are added at a time


@triton.jit
def add_parts(  # type: ignore[no-untyped-def]
    parts, out, P, columns, TURNS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([PARTS, COLUMNS], tl.float32)
    for turn in range(TURNS):
        part = turn * PARTS + tl.arange(0, PARTS)
        at = parts + part.to(tl.int64)[:, None] * columns + column[None, :]
        here = (part < P)[:, None] & (column < columns)[None, :]
        sums += tl.load(at, mask=here, other=0.0)
    tl.store(out + column, tl.sum(sums, 0).to(out.dtype.element_ty), mask=column < columns)


def part_sum(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """parts[0] + parts[1] + ... of fp32 [P, ...], contiguous, in fp32 and rounded once to `dtype`.

    The sum of no parts is 0.
    """
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    P, columns = parts.shape[0], out.numel()
    turns = triton.cdiv(P, _PARTS)
    if columns:
        add_parts[(triton.cdiv(columns, _COLUMNS),)](
            parts, out, P, columns, TURNS=turns, PARTS=_PARTS, COLUMNS=_COLUMNS
        )
    return out
