"""Sums in Triton, without atomics: the order of additions depends only on shapes.

`partial_sums` and `add_up` are `kernels.elementwise.sums` on an NVIDIA GPU, as fast as memory is
read; `part_sum` and `add_rows` are second steps, of rows that the programs of another kernel wrote.

Legend: P rows, N columns.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_PROGRAMS = 2112  # per tensor: 16 for each of a Hopper GPU's 132 SMs, and the same on every GPU


@triton.jit
def square_sum(values, out, n, each, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # A program has `each` successive elements, added in BLOCK sums of its own and then to one. How
    # many programs there are is fixed: on every GPU the same additions in the same order.
    first = tl.program_id(0).to(tl.int64) * each
    sums = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, each, BLOCK):
        at = first + i + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < n, other=0.0).to(tl.float32)
        sums += x * x
    tl.store(out + tl.program_id(0), tl.sum(sums, 0))


def partial_sums(tensors: Sequence[Tensor]) -> Tensor:
    """fp32 [tensors, programs]: sums of squares of equal parts of each, which is contiguous."""
    out = tensors[0].new_empty(len(tensors), _PROGRAMS, dtype=torch.float32)
    for t, row in zip(tensors, out.unbind(), strict=True):
        each = triton.cdiv(triton.cdiv(t.numel(), _PROGRAMS), _BLOCK) * _BLOCK
        square_sum[(_PROGRAMS,)](t, row, t.numel(), each, BLOCK=_BLOCK, num_warps=8)
    return out


_MOST_ADDENDS = 2


@triton.jit
def block_sum(  # type: ignore[no-untyped-def]
    blocks, first, second, out, n, R: tl.constexpr, ADDENDS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    # In the order of blocks, in fp32, rounded once at the store. All ranks' sums of a token are
    # added in this order, by whichever transport they came.
    total = tl.load(blocks + at, mask=inside).to(tl.float32)
    for r in tl.static_range(1, R):
        total += tl.load(blocks + r * n + at, mask=inside).to(tl.float32)
    if ADDENDS > 0:
        total += tl.load(first + at, mask=inside).to(tl.float32)
    if ADDENDS > 1:
        total += tl.load(second + at, mask=inside).to(tl.float32)
    tl.store(out + at, total, mask=inside)


def add_up(blocks: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
    """`kernels.elementwise.sums.block_sum` on a GPU."""
    if len(addends) > _MOST_ADDENDS:
        raise ValueError(f"at most {_MOST_ADDENDS} addends, not {len(addends)}")
    out = blocks.new_empty(blocks.shape[1:])
    n = out.numel()
    if n:
        grid = (triton.cdiv(n, _BLOCK),)
        pointers = [addend.contiguous() for addend in addends]
        # A kernel takes two pointers: those that are absent are any, as nothing is read there.
        pointers += [out] * (_MOST_ADDENDS - len(pointers))
        constants = dict(R=blocks.shape[0], ADDENDS=len(addends), BLOCK=_BLOCK)
        block_sum[grid](blocks, *pointers, out, n, **constants, num_warps=8)
    return out


_PARTS, _COLUMNS = 256, 8  # rows and columns that are added at a time


@triton.jit
def add_parts(  # type: ignore[no-untyped-def]
    parts, out, P, columns, TURNS: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr
):
    # A program has COLUMNS columns and all rows: one pass, and nothing to be combined with other
    # programs.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros([PARTS, COLUMNS], tl.float32)
    # Row r is added to sum r % PARTS: an order that depends on P alone.
    for turn in range(TURNS):
        part = turn * PARTS + tl.arange(0, PARTS)
        at = parts + part.to(tl.int64)[:, None] * columns + column[None, :]
        here = (part < P)[:, None] & (column < columns)[None, :]
        sums += tl.load(at, mask=here, other=0.0)
    tl.store(out + column, tl.sum(sums, 0).to(out.dtype.element_ty), mask=column < columns)


def part_sum(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Sum of fp32 [P, ...], contiguous, in fp32 and rounded once to `dtype`; of no parts 0."""
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    P, columns = parts.shape[0], out.numel()
    turns = triton.cdiv(P, _PARTS)
    if columns:
        add_parts[(triton.cdiv(columns, _COLUMNS),)](
            parts, out, P, columns, TURNS=turns, PARTS=_PARTS, COLUMNS=_COLUMNS
        )
    return out


_GRADIENT_ROWS = 256
_GRADIENT_COLUMNS = 16  # columns of a block: few, so that narrow tensors still occupy several SMs


@triton.jit
def norm_weight_gradient(  # type: ignore[no-untyped-def]
    partial, out, N, P: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    # As `add_parts`, to a tensor that may be added to.
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, P, ROWS):
        row = first + tl.arange(0, ROWS)
        here = (row < P)[:, None] & inside[None, :]
        total += tl.load(partial + row[:, None] * N + column[None, :], mask=here, other=0.0)
    value = tl.sum(total, 0)
    # After the sum, and rounded with it: a gradient in bf16 is rounded once a launch.
    if ADD:
        value += tl.load(out + column, mask=inside).to(tl.float32)
    tl.store(out + column, value, mask=inside)


def add_rows(partial_PN: Tensor, out_N: Tensor, *, add: bool) -> Tensor:
    """Write the sum of contiguous fp32 rows to `out_N`, bf16 or fp32, or add it; return `out_N`."""
    P, N = partial_PN.shape
    grid = (triton.cdiv(N, _GRADIENT_COLUMNS),)
    norm_weight_gradient[grid](
        partial_PN,
        out_N,
        N,
        P=P,
        ADD=add,
        ROWS=_GRADIENT_ROWS,
        COLUMNS=_GRADIENT_COLUMNS,
        num_warps=8,
    )
    return out_N
