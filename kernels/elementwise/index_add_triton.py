"""`kernels.elementwise.index_add` on an NVIDIA GPU, in Triton, once the index is sorted.

Rows of one key are contiguous, a run. In text a token may be a tenth of all, so runs are split at
the ends of blocks of `_BLOCK` positions, and pieces are summed in parallel: a piece that is a
complete run goes to the table, others to a slot of their block; a second kernel sums the slots of a
run in order. A block has at most two such pieces: one that continues from the previous block and
one that continues into the next, or does both, in the first slot.

Legend: V rows of the table, T positions, D channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 1024  # channels per program
_ROWS = 2  # rows that a program adds at a time: most runs of a text have one
_SLOTS = 8  # slots of a run that a program adds at a time
_BLOCK = 32  # positions per block


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
    this_key = tl.load(key + first)
    starts = tl.load(key + first - 1, mask=first > 0, other=-1) != this_key
    if (starts | (first % BLOCK == 0)) & (this_key < V):
        block = first // BLOCK
        end = tl.minimum((block + 1) * BLOCK, T)
        ends = tl.load(key + end, mask=end < T, other=-1) != this_key
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < D
        sums = tl.zeros([ROWS, CHANNELS], tl.float32)
        at = first
        more = 1
        while more > 0:
            position = at + tl.arange(0, ROWS)
            same = tl.load(key + position, mask=position < end, other=-1) == this_key
            token = tl.load(order + position, mask=same, other=0).to(tl.int64)
            here = same[:, None] & inside[None, :]
            x = tl.load(rows + token[:, None] * D + channel[None, :], mask=here, other=0.0)
            sums += x.to(tl.float32)
            at += ROWS
            more = tl.min(same.to(tl.int32), 0)
        total = tl.sum(sums, 0)
        if starts & ends:
            to = table + this_key.to(tl.int64) * D + channel
            total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
            tl.store(to, total.to(table.dtype.element_ty), mask=inside)
        else:
            slot = 2 * block + starts.to(tl.int32)
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
    """Sum of the run that starts in this block and continues into the next."""
    block = tl.program_id(0)
    this_key = tl.load(key + (block + 1) * BLOCK - 1)
    before = tl.load(key + block * BLOCK - 1, mask=block > 0, other=-1)
    after = tl.load(key + (block + 1) * BLOCK)
    if (this_key == after) & (this_key != before) & (this_key < V):
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < D
        to = table + this_key.to(tl.int64) * D + channel
        total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(
            pieces + (2 * block + 1).to(tl.int64) * D + channel, mask=inside, other=0.0
        )
        sums = tl.zeros([SLOTS, CHANNELS], tl.float32)
        at = block + 1
        more = 1
        while more > 0:
            later = at + tl.arange(0, SLOTS)
            same = tl.load(key + later * BLOCK, mask=later * BLOCK < T, other=-1) == this_key
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
        key_T: int32, sorted; keys of V or more have no row.
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
