"""Rows cleared, added to a table, and transposed on an NVIDIA GPU, in Triton.

For `kernels.elementwise.rows`, and for the weights of `kernels.functional.layouts`.

Rows that are added are sorted by key: those of one key are a run. In text a token may be a tenth of
all, so runs are split at the ends of blocks of `_BLOCK` positions, and pieces are summed in
parallel: a piece that is a complete run goes to the table, others to a slot of their block; a
second kernel sums the slots of a run in order. A block has at most two such pieces: one that
continues from the previous block and one that continues into the next, or does both, in the first
slot.

Legend: S rows, L experts, V rows of a table, T positions, D channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_CLEARED_ROWS = 16  # rows per program
_CLEARED_CHANNELS = 512  # channels that a program writes at a time


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
    # The number of used rows is known only on the device: the grid covers all rows, and programs
    # whose rows are used end at once.
    used = tl.load(offsets + L)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if used < (tl.program_id(0) + 1) * ROWS:
        at = rows + row.to(tl.int64)[:, None] * D
        clear = ((row >= used) & (row < S))[:, None]
        for first in range(0, D, CHANNELS):
            channel = first + tl.arange(0, CHANNELS)[None, :]
            tl.store(at + channel, 0.0, mask=clear & (channel < D))


def clear(rows_SD: Tensor, offsets: Tensor) -> None:
    """`kernels.elementwise.rows.clear_padding`."""
    S, D = rows_SD.shape
    if rows_SD.numel():
        sizes = dict(ROWS=_CLEARED_ROWS, CHANNELS=_CLEARED_CHANNELS)
        clear_rows[(triton.cdiv(S, _CLEARED_ROWS),)](
            rows_SD, offsets, S, D, offsets.numel() - 1, **sizes
        )


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
    # A program for each position and piece of channels; most end here. What goes on is the first
    # position of a piece, which takes the rest of it: a run's start, or that of a block.
    first = tl.program_id(0)
    this_key = tl.load(key + first)
    starts = tl.load(key + first - 1, mask=first > 0, other=-1) != this_key
    if (starts | (first % BLOCK == 0)) & (this_key < V):
        block = first // BLOCK
        # A piece ends with its block: a run of any length is summed by as many programs.
        end = tl.minimum((block + 1) * BLOCK, T)
        # Keys are sorted: if the one behind the block differs, the run ends inside.
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
            # 0 as soon as one of these positions is not of the piece.
            more = tl.min(same.to(tl.int32), 0)
        total = tl.sum(sums, 0)
        # Nobody else has this key: a plain addition to the table. Other pieces meet in the next
        # kernel, where one program adds a run.
        if starts & ends:
            to = table + this_key.to(tl.int64) * D + channel
            total += tl.load(to, mask=inside, other=0.0).to(tl.float32)
            tl.store(to, total.to(table.dtype.element_ty), mask=inside)
        else:
            # At most one piece of a block goes on from the block before, and at most one of the
            # others goes on into the next: two slots, each written by one program.
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
    # The last run of the block. Blocks in which no such run begins have nothing to add.
    this_key = tl.load(key + (block + 1) * BLOCK - 1)
    before = tl.load(key + block * BLOCK - 1, mask=block > 0, other=-1)
    after = tl.load(key + (block + 1) * BLOCK)
    if (this_key == after) & (this_key != before) & (this_key < V):
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        inside = channel < D
        # Only this program adds to the row: the kernel before left runs of several blocks out.
        to = table + this_key.to(tl.int64) * D + channel
        total = tl.load(to, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(
            pieces + (2 * block + 1).to(tl.int64) * D + channel, mask=inside, other=0.0
        )
        # Slots of the following blocks while these begin with the key. The order is that of blocks,
        # whatever finished first.
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
    """table[key[i]] += rows[order[i]]; int32 keys, sorted, of V or more have no row."""
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


_TILE = 64  # rows and channels of a tile: 128 bytes of bf16 in a line on both sides


@triton.jit
def transpose(  # type: ignore[no-untyped-def]
    stored, turned, D, H, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, TILE: tl.constexpr
):
    expert = tl.program_id(2).to(tl.int64) * D * H
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    h = tl.program_id(0) * TILE + tl.arange(0, TILE)
    # Rows of the turned matrix are the columns of the stored one.
    row = h
    if INTERLEAVED:  # gate 0, up 0, gate 1, ...: rows of gates come first
        row = (h % 2) * (H // 2) + h // 2
    of_stored = stored + expert + d[:, None].to(tl.int64) * H + h[None, :]
    of_turned = turned + expert + row[:, None].to(tl.int64) * D + d[None, :]
    inside = (d[:, None] < D) & (h[None, :] < H)
    # One kernel for both ways: `stored` and `turned` say what lies where, not which is read.
    if BACK:
        x = tl.load(of_turned, mask=tl.trans(inside))
        tl.store(of_stored, tl.trans(x), mask=inside)
    else:
        x = tl.load(of_stored, mask=inside)
        tl.store(of_turned, tl.trans(x), mask=tl.trans(inside))


def launch(x: Tensor, *, interleaved: bool, back: bool) -> Tensor:
    """`kernels.functional.layouts.transposed`."""
    experts, rows, columns = x.shape
    out = x.new_empty(experts, columns, rows)
    if not x.numel():
        return out
    stored, turned = (out, x) if back else (x, out)
    D, H = stored.shape[1:]
    grid = (triton.cdiv(H, _TILE), triton.cdiv(D, _TILE), experts)
    # Weights may be on another device than the current one, to which Triton would launch.
    with torch.cuda.device(x.device):
        transpose[grid](
            *(stored, turned, D, H), INTERLEAVED=interleaved, BACK=back, TILE=_TILE, num_warps=4
        )
    return out
