"""Multiplying warp groups in FP8: multiply a block, scale its sums, add them in fp32.

A block of 128 channels of a row has a scale, and one of 128 x 128 of the other operand; their
product multiplies the block's sums on the way from the temporary to the fp32 accumulator. A thread
has two rows, 8 apart, so a block takes two products of scales for 128 columns, and one FFMA an
accumulator. While one warp group does that, the other one keeps the tensor cores busy.

Scales come from memory, two blocks ahead of their use.

Roles are those of `gemm.gemm.Gemm`; both groups share a tile, 64 of its 128 rows each. For every
block (stage) of the contraction a group does

    wait full[stage]    unless a try_wait under the last wgmma has found it full
    part 0 .. n         n = 0, or 1 for tiles of 256 columns:
                          wgmma of 4 x 32 channels into the temporary accumulator, commit
                          in flight with it: scales of block k + 2; after the last part's, try_wait
                          of the next stage
                          wait for the wgmma; after the last part, arrive at empty[stage]
                          accumulators += product of scales * temporary

    barriers: those of `gemm.ring`; full 1 (+ 128 of the copiers if A is gathered), empty 8

The groups do not synchronise with each other: while one adds, the other's wgmma run.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, TILE_ROWS
from phalanx.kernels.sm90.jit import ptx

BLOCK = 128  # channels of a stage, and of a scale
_ATOM = 64
_DEEP = 32  # channels of a wgmma


@dataclass(frozen=True)
class Scales:
    """Addresses of a thread's scales for a tile's first block, and bytes to the next block's."""

    rows: tuple[Int64, ...]
    """Scales of the thread's first row of its warp's 16 and of the one 8 below; or one for both."""
    row_step: Int64
    columns: tuple[Int64, ...]
    """Scales of the tile's first 128 columns, and of the rest if it has more; of 192 columns that
    begin in the middle of a block, of the first 64 and of the rest."""
    column_step: Int64
    aligned: Boolean  # true if the tile's columns begin with a block


class Promotion:
    """Side of a multiplying warp group. `acc` holds its part of the tile after `multiply`.

    A thread's accumulators, flat, are those of `gemm.mainloop.MmaConsumer`.
    """

    def __init__(
        self,
        loop: Any,
        storage: Any,
        tiled_mma: cute.TiledMma,
        group: Int32,
        fresh: bool = False,
    ) -> None:
        """`group` is 0 or 1; `fresh`: other GPUs write scales while the kernel runs."""
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
        # Both in registers, with a tile of 256 columns 128 + 64 of a thread's 232.
        self.temporary = cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def start(self) -> None:
        """Nothing to do: the groups do not take turns."""

    @cute.jit
    def skip(self, first: Int32, blocks: Int32) -> None:
        """Release `blocks` stages unread: the tile has no rows for this warp group."""
        for k in cutlass.range(blocks, unroll=1):
            self.ring.consumer_release(self.ring.consumer_wait_block(first + k))

    @cute.jit
    def multiply(self, first: Int32, blocks: Int32, scales: Scales, add: Any = False) -> None:
        """Multiply `blocks` >= 1 stages, from block number `first` on; `add` to the accumulator, or
        overwrite it.

        All but the additions is done while wgmma run: the scales of the block after the next one
        are requested (none past the last), and the next stage is looked for.
        """
        # Not by the first wgmma: it overwrites the temporary accumulator alone.
        if cutlass.const_expr(add is False):
            self.acc.fill(0.0)
        else:
            self._keep(add)
        ring, last = self.ring, len(self.b) - 1
        rows, columns = scales.rows, scales.columns
        # By division once a tile; `next_position` counts on from there.
        stage, phase = ring.position(first)
        # The loading warps have waited for the rows and their scales: a full stage says so.
        if cutlass.const_expr(self.fresh):
            ring.consumer_wait(stage, phase)
        more, ready = blocks > 1, Boolean(False)
        a, b = self._load_rows(rows, Boolean(True)), self._load_columns(columns, Boolean(True))
        rows, columns = _step(rows, scales.row_step), _step(columns, scales.column_step)
        next_a, next_b = self._load_rows(rows, more), self._load_columns(columns, more)
        for k in cutlass.range(blocks, unroll=1):
            if ~ready:
                ring.consumer_wait(stage, phase)
            # From here to the wait the tensor cores are busy: all other work of the block comes in
            # between.
            self._start(0, stage)
            rows, columns = _step(rows, scales.row_step), _step(columns, scales.column_step)
            more = k + 2 < blocks
            then_a, then_b = self._load_rows(rows, more), self._load_columns(columns, more)
            next_stage, next_phase = ring.next_position(stage, phase)
            for p in cutlass.range_constexpr(last + 1):
                if cutlass.const_expr(p > 0):
                    self._start(p, stage)
                if cutlass.const_expr(p == last):
                    ready = ring.consumer_try_wait(next_stage, next_phase)
                # All of it: `_add` reads the temporary accumulator, the next wgmma overwrites it.
                warpgroup.wait_group(0)
                if cutlass.const_expr(p == last):
                    ring.consumer_release(stage)
                self._add(p, a, b, scales)
            stage, phase = next_stage, next_phase
            a, b, next_a, next_b = next_a, next_b, then_a, then_b

    def _keep(self, add: Boolean) -> None:
        """Clear the accumulators unless `add`."""
        # The temporary ones too: no registers for their values while scales are looked up.
        self.temporary.fill(0.0)
        for i in range(cute.size(self.acc)):
            self.acc[i] = cutlass.select_(add, self.acc[i], Float32(0.0))

    def _load_rows(self, addresses: tuple[Int64, ...], wanted: Boolean) -> tuple[Float32, ...]:
        load = ptx.load_fresh_if if self.fresh else ptx.load_constant_if
        return tuple(load(at, wanted) for at in addresses)

    def _load_columns(self, addresses: tuple[Int64, ...], wanted: Boolean) -> tuple[Float32, ...]:
        return tuple(ptx.load_constant_if(at, wanted) for at in addresses)

    def _start(self, p: int, stage: Int32) -> None:
        """Issue the wgmma of part p of a stage."""
        # Orders the reads and writes of the accumulator in registers before wgmma.
        warpgroup.fence()
        for step in range(BLOCK // _DEEP):
            self.tiled_mma.set(warpgroup.Field.ACCUMULATE, step != 0)
            at = (None, None, step, stage)
            cute.gemm(self.tiled_mma, self.temporary, self.a[at], self.b[p][at], self.temporary)
        warpgroup.commit_group()

    def _add(
        self,
        p: int,
        rows: tuple[Float32, ...],
        columns: tuple[Float32, ...],
        scales: Scales,
    ) -> None:
        """Add part p of a block to the accumulators: one product of scales for a row of many."""
        # Blocks of columns begin at multiples of 64 of a tile of 192, of 128 of others.
        part, wide = self.loop.part, _ATOM if self.loop.columns == 192 else BLOCK
        low, high = columns[0], columns[-1]
        of_atoms = (low, cutlass.select_(scales.aligned, low, high), high)
        for first in range(part * p, part * (p + 1), wide):
            scale = of_atoms[first // _ATOM] if wide == _ATOM else columns[first // BLOCK]
            both = (rows[0] * scale, rows[-1] * scale)
            for i in range(wide // 2):
                to = first // 2 + i
                value = self.temporary[to - part * p // 2]
                self.acc[to] = self.acc[to] + both[i // 2 % 2] * value


class Fp8MmaConsumer(Promotion):
    """Rows by weights, as the grouped GEMMs multiply them."""

    def __init__(
        self,
        loop: Any,
        storage: Any,
        tiled_mma: cute.TiledMma,
        group: Int32,
        scales: Any,
        index: cute.Tensor,
        waits: bool,
    ) -> None:
        """`scales` as `mainloop.operand_scales` returns them; `waits`: rows arrive while the kernel
        runs."""
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
        # A zero that the compiler takes for a value of the lane: if it saw that all lanes load the
        # same scale, it would move it to a uniform register, and wait for the load at once.
        lane_zero = ptx.lane() * self.zero
        blocks = (low,) if self.loop.columns == BLOCK else (low, high)
        columns = [address(of_weights, at + lane_zero, 0, expert) for at in blocks]
        return Scales(
            tuple(rows),
            4 * Int64(of_rows.stride[1]),
            tuple(columns),
            4 * Int64(of_weights.stride[1]),
            n % BLOCK == 0,
        )


def _step(addresses: tuple[Int64, ...], step: Int64) -> tuple[Int64, ...]:
    return tuple(at + step for at in addresses)


def address(tensor: cute.Tensor, *at: Int32 | int) -> Int64:
    """Address of an fp32 element, by the tensor's strides."""
    result = tensor.iterator.toint()
    for index, stride in zip(at, tensor.stride, strict=False):
        if not (isinstance(index, int) and index == 0):
            result = result + 4 * Int64(index) * Int64(stride)
    return result
