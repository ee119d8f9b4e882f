"""`kernels.elementwise.index_add` on an NVIDIA GPU, in Triton, once the index is sorted.

Rows of one key stand together, a run. In text a token may be a tenth of all, so runs are cut where
a block of `_BLOCK` places ends, and pieces are added at once: a piece that is a whole run goes to
the table, others to a slot of their block; a second kernel adds the slots of a run in their order.
A block has at most two such pieces: one that goes on from the block before and one that goes on
into the next, or is both, in the first slot.

Legend: V rows of the table, T places, D channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 1024
"""Of a program."""
_ROWS = 2
"""Rows that a program adds at a time: most runs of a text are of one."""
_SLOTS = 8
"""Slots of a run that a program adds at a time."""
_BLOCK = 32
"""Places of a block."""


@triton.jit
def embedding_gradient(  # type: ignore[no-untyped-def]
    table,
    pieces,
    key,
    order,
    rows,
    T,
    V,
    D,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    first = tl.program_id(0)
    own = tl.load(key + first)
    begins = tl.load(key + first - 1, mask=first > 0, other=-1) != own
    if (begins | (first % BLOCK == 0)) & (own < V):
        block = first // BLOCK
        end = tl.minimum((block + 1) * BLOCK, T)
        ends = tl.load(key + end, mask=end < T, other=-1) != own
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < D
        sums = tl.zeros([ROWS, CHANNELS], tl.float32)
        at = first
        more = 1
        while more > 0:
            place = at + tl.arange(0, ROWS)
            same = tl.load(key + place, mask=place < end, other=-1) == own
            token = tl.load(order + place, mask=same, other=0).to(tl.int64)
            here = same[:, None] & inside[None, :]
            x = tl.load(rows + token[:, None] * D + channel[None, :], mask=here, other=0.0)
            sums += x.to(tl.float32)
            at += ROWS
            more = tl.min(same.to(tl.int32), 0)
        total = tl.sum(sums, 0)
        if begins & ends:
            to = table + own.to(tl.int64) * D + channel
            total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
            tl.store(to, total.to(table.dtype.element_ty), mask=inside)
        else:
            slot = 2 * block + begins.to(tl.int32)
            tl.store(pieces + slot.to(tl.int64) * D + channel, total, mask=inside)


@triton.jit
def embedding_gradient_runs(  # type: ignore[no-untyped-def]
    table,
    pieces,
    key,
    T,
    V,
    D,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Of the run that begins in this block and goes on into the next."""
    block = tl.program_id(0)
    own = tl.load(key + (block + 1) * BLOCK - 1)
    before = tl.load(key + block * BLOCK - 1, mask=block > 0, other=-1)
    after = tl.load(key + (block + 1) * BLOCK)
    if (own == after) & (own != before) & (own < V):
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < D
        to = table + own.to(tl.int64) * D + channel
        total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(
            pieces + (2 * block + 1).to(tl.int64) * D + channel, mask=inside, other=0.0
        )
        sums = tl.zeros([SLOTS, CHANNELS], tl.float32)
        at = block + 1
        more = 1
        while more > 0:
            later = at + tl.arange(0, SLOTS)
            same = tl.load(key + later * BLOCK, mask=later * BLOCK < T, other=-1) == own
            slot = (2 * later).to(tl.int64)
            here = same[:, None] & inside[None, :]
            sums += tl.load(pieces + slot[:, None] * D + channel[None, :], mask=here, other=0.0)
            at += SLOTS
            more = tl.min(same.to(tl.int32), 0)
        tl.store(to, (total + tl.sum(sums, 0)).to(table.dtype.element_ty), mask=inside)


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
    blocks, along = triton.cdiv(T, _BLOCK), triton.cdiv(D, _CHANNELS)
    pieces = torch.empty(blocks, 2, D, dtype=torch.float32, device=rows_TD.device)
    sizes = dict(BLOCK=_BLOCK, CHANNELS=_CHANNELS)
    embedding_gradient[(T, along)](
        table_VD, pieces, key_T, order_T, rows_TD, T, V, D, ROWS=_ROWS, **sizes
    )
    if blocks > 1:
        embedding_gradient_runs[(blocks - 1, along)](
            table_VD, pieces, key_T, T, V, D, SLOTS=_SLOTS, **sizes
        )
