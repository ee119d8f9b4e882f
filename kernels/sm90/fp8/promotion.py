"""What the multiplying warp groups do with stages in FP8: multiply a block, scale it, add it up.

A block of 128 channels of a row has a scale, and one of 128 x 128 of the other operand; their
product multiplies the block's sums on the way from the temporary to the fp32 accumulator. A thread
has two rows, 8 apart, so a block takes two products of scales for 128 columns, and one FFMA an
accumulator. While one warp group does that, the other one keeps the tensor cores busy.

Scales come from memory, two blocks ahead of their use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from phalanx.kernels.sm90.fp8.mainloop import BLOCK, Fp8Mainloop
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, TILE_ROWS
from phalanx.kernels.sm90.jit import ptx

_ATOM = 64
_DEEP = 32
"""Channels of a wgmma."""


@dataclass(frozen=True)
class Scales:
    """Where a thread finds the scales of a tile: addresses of a block's, and bytes to the next."""

    rows: tuple[Int64, ...]
    """Of the thread's first row of its warp's 16, and of the one 8 below; or one for both."""
    row_step: Int64
    columns: tuple[Int64, Int64]
    """Of the tile's first 128 columns, and of the others; of 192 that begin in the middle of a
    block, of the first 64 and of the others."""
    column_step: Int64
    aligned: Boolean
    """The tile's columns begin with a block."""


class Promotion:
    """A multiplying warp group's side. `acc` holds its part of the tile after `multiply`.

    A thread's accumulators, flat, are those of `gemm.mainloop.Math`.
    """

    def __init__(
        self,
        loop: Fp8Mainloop,
        storage: Any,
        tiled_mma: cute.TiledMma,
        group: Int32,
        fresh: bool = False,
    ) -> None:
        """`group` is 0 or 1; `fresh`: scales may change while the kernel runs."""
        self.loop, self.ring, self.tiled_mma = loop, loop.ring(storage), tiled_mma
        self.group, self.fresh = group, fresh
        layout_a, layout_b = loop.smem_layouts()
        a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        mma = tiled_mma.get_slice(group * GROUP_THREADS)
        self.a = tiled_mma.make_fragment_A(mma.partition_A(a))
        self.b = []
        for p in range(loop.columns // loop.part):
            columns = cute.local_tile(b, (loop.part, BLOCK, loop.stages), (p, 0, 0))
            self.b.append(tiled_mma.make_fragment_B(mma.partition_B(columns)))
        self.acc = cute.make_rmem_tensor(loop.columns // 2, Float32)
        shape = tiled_mma.partition_shape_C((TILE_ROWS, loop.part))
        self.temporary = cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def start(self) -> None:
        """Nothing to wait for."""

    @cute.jit
    def skip(self, first: Int32, blocks: Int32) -> None:
        """Let `blocks` stages go, as none of the warp group's rows is wanted."""
        for k in cutlass.range(blocks, unroll=1):
            self.ring.release(self.ring.wait(first + k))

    @cute.jit
    def multiply(self, first: Int32, blocks: Int32, scales: Scales) -> None:
        """Multiply `blocks` >= 1 stages, from block number `first` on, into a fresh accumulator."""
        self.acc.fill(0.0)
        place0, place1 = scales.rows[0], scales.rows[-1]
        one_row = len(scales.rows) == 1
        low, high = scales.columns
        row_step, column_step = scales.row_step, scales.column_step
        aligned = scales.aligned
        if cutlass.const_expr(self.fresh):  # the loading warps have waited for the rows
            self.ring.wait(first)
        one = Int64(cutlass.min(1, blocks - 1))
        a0, a1 = self._load_rows(place0, place1, Int64(0), one_row)
        b0, b1 = self._load_columns(low, high, Int64(0))
        next_a0, next_a1 = self._load_rows(place0, place1, row_step * one, one_row)
        next_b0, next_b1 = self._load_columns(low, high, column_step * one)
        for k in cutlass.range(blocks, unroll=1):
            two = Int64(cutlass.min(k + 2, blocks - 1))
            then_a0, then_a1 = self._load_rows(place0, place1, row_step * two, one_row)
            then_b0, then_b1 = self._load_columns(low, high, column_step * two)
            stage = self.ring.wait(first + k)
            columns = (b0, cutlass.select_(aligned, b0, b1), b1)
            self._block(stage, k, (a0, a1), columns, scales)
            a0, a1, next_a0, next_a1 = next_a0, next_a1, then_a0, then_a1
            b0, b1, next_b0, next_b1 = next_b0, next_b1, then_b0, then_b1

    def _load_rows(
        self, first: Int64, second: Int64, ahead: Int64, one: bool
    ) -> tuple[Float32, Float32]:
        load = ptx.load_fresh if self.fresh else ptx.load_constant
        found = load(first + ahead)
        return found, found if one else load(second + ahead)

    def _load_columns(self, low: Int64, high: Int64, ahead: Int64) -> tuple[Float32, Float32]:
        first = ptx.load_constant(low + ahead)
        return first, first if self.loop.columns == BLOCK else ptx.load_constant(high + ahead)

    def _block(
        self,
        stage: Int32,
        k: Int32,
        rows: tuple[Float32, ...],
        columns: tuple[Float32, ...],
        scales: Scales,
    ) -> None:
        """Multiply a stage, block k, part by part, and add it up with its scales; let it go."""
        if self.loop.gather:  # cp.async writes through the other proxy than wgmma reads by
            cute.arch.fence_proxy("async.shared", space="cta")
        for p, b in enumerate(self.b):
            warpgroup.fence()
            for step in range(BLOCK // _DEEP):
                self.tiled_mma.set(warpgroup.Field.ACCUMULATE, step != 0)
                at = (None, None, step, stage)
                cute.gemm(self.tiled_mma, self.temporary, self.a[at], b[at], self.temporary)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if p == len(self.b) - 1:
                self.ring.release(stage)
            self._add(p, k, rows, columns, scales)

    def _add(
        self,
        p: int,
        k: Int32,
        rows: tuple[Float32, ...],
        columns: tuple[Float32, ...],
        scales: Scales,
    ) -> None:
        """Add part p of a block to the accumulators: one product of scales for a row of many."""
        # Blocks of columns begin at multiples of 64 of a tile of 192, of 128 of others.
        part, wide = self.loop.part, _ATOM if self.loop.columns == 192 else BLOCK
        for first in range(part * p, part * (p + 1), wide):
            scale = columns[first // _ATOM] if wide == _ATOM else columns[2 * (first // BLOCK)]
            both = (rows[0] * scale, rows[1] * scale)
            for i in range(wide // 2):
                to = first // 2 + i
                here = self.temporary[to - part * p // 2]
                self.acc[to] = self.acc[to] + both[i // 2 % 2] * here


class Math(Promotion):
    """Of rows by weights, as the grouped GEMMs multiply them."""

    def __init__(
        self,
        loop: Fp8Mainloop,
        storage: Any,
        tiled_mma: cute.TiledMma,
        group: Int32,
        scales: Any,
        index: cute.Tensor,
        waits: bool,
    ) -> None:
        """`scales` is what `operand_scales` made; `waits`: rows arrive while the kernel runs."""
        super().__init__(loop, storage, tiled_mma, group, waits)
        self.of_rows, self.of_weights, self.half, self.zero = scales
        self.index = index
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % GROUP_THREADS // 32)
        self.first = group * _ATOM + warp * 16

    @cute.jit
    def __call__(
        self, first: Int32, blocks: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> None:
        """Multiply the tile at `row` and column tile `column` of an expert that ends at `end`."""
        if end - row > self.group * _ATOM:
            self.multiply(first, blocks, self._scales(row, end, column, expert))
        else:
            self.skip(first, blocks)

    def _scales(self, row: Int32, end: Int32, column: Int32, expert: Int32) -> Scales:
        of_rows, of_weights, n = self.of_rows, self.of_weights, column * self.loop.columns
        rows = []
        for half in range(2):
            at = cutlass.min(row + self.first + ptx.lane() // 4 + half * 8, end - 1)
            picked = self.index[at] if self.loop.gather else at
            rows.append(address(of_rows, picked, 0))
        last = Int32(of_weights.shape[0]) - 1
        low, high = cutlass.min(n // BLOCK, last), cutlass.min(n // BLOCK + 1, last)
        if self.half is not None:  # a tile has as many columns of either half
            low, high = column, column + self.half
        # The compiler must not see that the lanes agree: it would move what is loaded to uniform
        # registers, and wait for it at once.
        apart = ptx.lane() * self.zero
        columns = [address(of_weights, at + apart, 0, expert) for at in (low, high)]
        return Scales(
            (rows[0], rows[1]),
            4 * Int64(of_rows.stride[1]),
            (columns[0], columns[1]),
            4 * Int64(of_weights.stride[1]),
            n % BLOCK == 0,
        )


def operand_scales(
    rows: cute.Pointer,
    row_strides: Sequence[Int32],
    weights: cute.Pointer,
    weight_sizes: Sequence[Int32],
    halves: int,
    zero: Int32,
) -> tuple[Any, ...]:
    """Host side: what `Math` takes as scales.

    Args:
        rows: fp32 [rows, K blocks], its strides `row_strides`.
        weights: fp32 [L, N blocks, K blocks]; `weight_sizes` are N blocks and its strides.
        halves: 2 with a gate: half of the N blocks are the gate's.
        zero: 0, which the compiler must not know.
    """
    blocks, expert_stride, n_stride, k_stride = weight_sizes
    of_rows = cute.make_tensor(rows, cute.make_layout((1, 1), stride=tuple(row_strides)))
    layout = cute.make_layout((blocks, 1, 1), stride=(n_stride, k_stride, expert_stride))
    half = blocks // 2 if halves == 2 else None
    return of_rows, cute.make_tensor(weights, layout), half, zero


def address(tensor: cute.Tensor, *at: Int32 | int) -> Int64:
    """Of an fp32 element, by its strides."""
    found = tensor.iterator.toint()
    for index, stride in zip(at, tensor.stride, strict=False):
        if not (isinstance(index, int) and index == 0):
            found = found + 4 * Int64(index) * Int64(stride)
    return found
