"""`kernels.elementwise.index_add` on an NVIDIA GPU, in Triton, once the index is sorted.

The program at the first of equal keys adds all their rows, some at a time, in their order.
"""

import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 512
"""Of a program."""
_ROWS = 8
"""That a program adds at a time."""


@triton.jit
def embedding_gradient(  # type: ignore[no-untyped-def]
    table, key, order, rows, T, V, D, ROWS: tl.constexpr, CHANNELS: tl.constexpr
):
    first = tl.program_id(0)
    own = tl.load(key + first)
    before = tl.load(key + first - 1, mask=first > 0, other=-1)
    if (own != before) & (own < V):
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < D
        to = table + own.to(tl.int64) * D + channel
        total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        sums = tl.zeros([ROWS, CHANNELS], tl.float32)
        at = first
        more = 1
        while more > 0:
            place = at + tl.arange(0, ROWS)
            same = tl.load(key + place, mask=place < T, other=-1) == own
            token = tl.load(order + place, mask=same, other=0).to(tl.int64)
            here = same[:, None] & inside[None, :]
            x = tl.load(rows + token[:, None] * D + channel[None, :], mask=here, other=0.0)
            sums += x.to(tl.float32)
            at += ROWS
            more = tl.min(same.to(tl.int32), 0)
        total += tl.sum(sums, 0)
        tl.store(to, total.to(table.dtype.element_ty), mask=inside)


def add_rows(table_VD: Tensor, key_T: Tensor, order_T: Tensor, rows_TD: Tensor) -> None:
    """table[key[i]] += rows[order[i]].

    Args:
        table_VD, rows_TD: contiguous.
        key_T: int32, sorted; from V on there is no row.
        order_T: int64.
    """
    (T, D), V = rows_TD.shape, table_VD.shape[0]
    if not rows_TD.numel():
        return
    embedding_gradient[(T, triton.cdiv(D, _CHANNELS))](
        table_VD, key_T, order_T, rows_TD, T, V, D, ROWS=_ROWS, CHANNELS=_CHANNELS
    )
