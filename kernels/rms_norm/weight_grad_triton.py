"""The sum of rows in fp32, in Triton: the last step of a norm weight's gradient.

Legend: P rows, N columns.
"""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 256
_COLUMNS = 16  # columns of a block: few, so that narrow tensors still occupy several SMs


@triton.jit
def norm_weight_gradient(  # type: ignore[no-untyped-def]
    partial, out, N, P: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < N
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, P, ROWS):
        row = first + tl.arange(0, ROWS)
        here = (row < P)[:, None] & inside[None, :]
        total += tl.load(partial + row[:, None] * N + column[None, :], mask=here, other=0.0)
    value = tl.sum(total, 0)
    if ADD:
        value += tl.load(out + column, mask=inside).to(tl.float32)
    tl.store(out + column, value, mask=inside)


def add_rows(partial_PN: Tensor, out_N: Tensor, *, add: bool) -> Tensor:
    """Write the sum of contiguous fp32 rows to `out_N`, bf16 or fp32, or add it; return `out_N`.

    The order of additions depends only on P.
    """
    P, N = partial_PN.shape
    grid = (triton.cdiv(N, _COLUMNS),)
    norm_weight_gradient[grid](
        partial_PN, out_N, N, P=P, ADD=add, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8
    )
    return out_N
