"""`gemm.mainloop` for operands in FP8: e4m3 weights, e4m3 or e5m2 rows, with scales of blocks.

A stage holds 128 channels, the same bytes as 64 in bf16. Both operands have their contraction
contiguous, as wgmma requires in FP8, in one part or two: blocks of 128 channels restart in each,
and the last block of a part, if it is short, ends with zeros. So a part is a mode of its own in the
TMA descriptors, which fill with zeros what lies past its end.

A block of 128 channels of a row has a scale, and one of 128 x 128 of the other operand. Every stage
is multiplied into a temporary accumulator and added to the fp32 ones with the product of its scales
(`Promotion`): wgmma keeps some 14 bits of a sum of FP8 products, so nothing is summed there over
more than a block. A thread has two rows, 8 apart, so a block takes two products of scales for 128
columns, and one FFMA an accumulator.

Roles are those of `gemm.gemm.Gemm`; both groups share a tile, 64 of its 128 rows each, and do not
synchronise with each other: while one adds, the other's wgmma run. For every stage a group does

    wait full[stage]    unless a try_wait under the last wgmma has found it full
    part 0 .. n         n = 0, or 1 for tiles of 256 columns:
                          wgmma of 4 x 32 channels into the temporary accumulator, commit
                          in flight with it: scales of block k + 2; after the last part's, try_wait
                          of the next stage
                          wait for the wgmma; after the last part, arrive at empty[stage]
                          accumulators += product of scales * temporary

    barriers: those of `gemm.ring`; full 1 (+ 128 of the copiers if A is gathered), empty 8
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float8E4M3FN, Float8E5M2, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from phalanx.kernels.sm90.gemm.mainloop import (
    GROUP_THREADS,
    MMA_GROUPS,
    TILE_ROWS,
    Mainloop,
    Producer,
)
from phalanx.kernels.sm90.gemm.ring import State
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights
from phalanx.kernels.sm90.jit import ptx

BLOCK = 128  # channels of a stage, and of a scale
_ATOM = 64  # rows of a wgmma; columns after which a tile of 192 may begin another block
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
    """Side of a multiplying warp group. `acc` holds its part of the tile after `multiply`. A
    thread's accumulators, flat, are those of `gemm.mainloop.MmaConsumer`."""

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
        # A group has 64 of a stage's rows of A, and all of its columns of B.
        mma = tiled_mma.get_slice(group * GROUP_THREADS)
        self.a = tiled_mma.make_fragment_A(mma.partition_A(a))
        # A fragment for each part of the columns: a wgmma writes the temporary accumulator, which
        # is that wide.
        self.b = []
        for p in range(loop.columns // loop.part):
            columns = cute.local_tile(b, (loop.part, BLOCK, loop.stages), (p, 0, 0))
            self.b.append(tiled_mma.make_fragment_B(mma.partition_B(columns)))
        # 64 rows over 128 threads. Flat, as parts are added to it one after the other.
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
        # The empty barriers count the warps of both groups: without these arrivals the loading
        # warps would wait for a stage for ever.
        for k in cutlass.range(blocks, unroll=1):
            self.ring.consumer_release(self.ring.consumer_wait_block(first + k))

    @cute.jit
    def multiply(self, first: Int32, blocks: Int32, scales: Scales, add: Any = False) -> None:
        """Multiply `blocks` >= 1 stages, from block number `first` on; `add` to the accumulator, or
        not. All but the additions is done while wgmma run: the scales of the block after the next
        one are requested (none past the last), and the next stage is looked for."""
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
        # Scales are requested two blocks ahead, so that they are there when their block's sums are.
        # Those of the first two blocks have no product to hide under.
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
                # The sums of the part before have been added: their registers are free again.
                if cutlass.const_expr(p > 0):
                    self._start(p, stage)
                if cutlass.const_expr(p == last):
                    # After the last part's wgmma have started. Behind the tile's last block this
                    # looks at the next tile's stage, which nobody reads: the result is dropped.
                    ready = ring.consumer_try_wait(next_stage, next_phase)
                # All of it: `_add` reads the temporary accumulator, the next wgmma overwrites it.
                warpgroup.wait_group(0)
                if cutlass.const_expr(p == last):
                    # No wgmma reads the stage any more: it is loaded again under the additions.
                    ring.consumer_release(stage)
                self._add(p, a, b, scales)
            stage, phase = next_stage, next_phase
            a, b, next_a, next_b = next_a, next_b, then_a, then_b

    def _keep(self, add: Boolean) -> None:
        # The temporary ones too: no registers for their values while scales are looked up.
        self.temporary.fill(0.0)
        # A select: whether an earlier segment had rows is known only on the device.
        for i in range(cute.size(self.acc)):
            self.acc[i] = cutlass.select_(add, self.acc[i], Float32(0.0))

    def _load_rows(self, addresses: tuple[Int64, ...], wanted: Boolean) -> tuple[Float32, ...]:
        # A load by nc takes memory for constant, and may return a line of L1 from before the rows
        # arrived. What peers write meanwhile is read past L1, without a fence: the full barrier has
        # ordered it behind the flag that a loading warp acquired.
        load = ptx.load_fresh_if if self.fresh else ptx.load_constant_if
        return tuple(load(at, wanted) for at in addresses)

    def _load_columns(self, addresses: tuple[Int64, ...], wanted: Boolean) -> tuple[Float32, ...]:
        return tuple(ptx.load_constant_if(at, wanted) for at in addresses)

    def _start(self, p: int, stage: Int32) -> None:
        # Orders the reads and writes of the accumulator in registers before wgmma.
        warpgroup.fence()
        for step in range(BLOCK // _DEEP):
            # The first step overwrites: no sum of wgmma spans more than a block.
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
            # The same product twice where rows have one scale, as in `wgrad`.
            both = (rows[0] * scale, rows[-1] * scale)
            for i in range(wide // 2):
                to = first // 2 + i
                value = self.temporary[to - part * p // 2]
                # Of four accumulators two are in the lane's first row, and two 8 rows below.
                self.acc[to] = self.acc[to] + both[i // 2 % 2] * value


class Fp8MmaConsumer(Promotion):
    """Rows by weights; `scales` of `operand_scales`, `waits` if rows arrive meanwhile."""

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
        super().__init__(loop, storage, tiled_mma, group, waits)
        self.of_rows, self.of_weights, self.half, self.zero = scales
        self.index = index
        warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] % GROUP_THREADS // 32)
        self.first = group * _ATOM + warp * 16  # the warp's first row in the tile

    @cute.jit
    def __call__(
        self, first: Int32, blocks: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> None:
        # A tile with at most 64 rows has none for the second group.
        if end - row > self.group * _ATOM:
            self.multiply(first, blocks, self._scales(row, end, column, expert))
        else:
            self.skip(first, blocks)

    def _scales(self, row: Int32, end: Int32, column: Int32, expert: Int32) -> Scales:
        of_rows, of_weights, n = self.of_rows, self.of_weights, column * self.loop.columns
        rows = []
        for half in range(2):
            # Past the expert's end its last row again: the index may hold anything there, and
            # nothing is stored from these rows.
            at = cutlass.min(row + self.first + ptx.lane() // 4 + half * 8, end - 1)
            picked = self.index[at] if self.loop.gather else at
            rows.append(address(of_rows, picked, 0))
        # The last tile may end beyond the last column, where B is zero: a scale that exists is
        # enough.
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


FORMATS = {"e4m3": Float8E4M3FN, "e5m2": Float8E5M2}
_CHUNK = 16  # bytes of a cp.async, and so many channels


@dataclass(frozen=True)
class Fp8Mainloop(Mainloop):
    """Tiles that both warp groups share."""

    rows_format: str = "e4m3"  # format of A, one of `FORMATS`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pingpong or self.b_transposed:
            raise ValueError("FP8: no ping-pong, and B has its contraction contiguous")
        if self.rows_format not in FORMATS:
            raise ValueError(f"rows_format={self.rows_format!r}: one of {', '.join(FORMATS)}")

    @property
    def types(self) -> tuple[Any, Any]:
        return FORMATS[self.rows_format], Float8E4M3FN

    @property
    def copies_in_flight(self) -> int:
        """Stages whose gathered rows are in flight when the one before them is declared full: two
        less than there are leaves one to the multiplying warps."""
        return min(2, self.stages - 2)

    @property
    def part(self) -> int:
        """Columns of the temporary accumulator: a tile of 256 is multiplied in two halves."""
        return 192 if self.columns == 192 else BLOCK

    def blocks(self, mA: cute.Tensor) -> Int32:
        # Each part has a last block of its own, which may be short.
        return (mA.shape[1] + (BLOCK - 1)) // BLOCK * mA.shape[2]

    def operands(
        self, a: Rows, b: Weights, num_gate_parts: int
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        of_a, of_b = self.types
        return (
            activations(cute.recast_ptr(a.data, dtype=of_a), a.rows, a.channels, a.parts, a.pitch),
            weights(cute.recast_ptr(b.data, dtype=of_b), b.columns, b.channels, b.parts, b.experts),
            operand_scales(a, b, num_gate_parts),
        )

    def tiled_mma(self) -> cute.TiledMma:
        major = OperandMajorMode.K
        groups, tile = (MMA_GROUPS, 1, 1), (_ATOM, self.part)
        return hopper.make_trivial_tiled_mma(
            *self.types, major, major, Float32, groups, tiler_mn=tile
        )

    def producer(self, *args: Any) -> "Fp8Producer":
        return Fp8Producer(self, *args)

    def mma_consumer(
        self, storage: Any, tiled_mma: cute.TiledMma, group: Int32, *scales: Any
    ) -> Any:
        return Fp8MmaConsumer(self, storage, tiled_mma, group, *scales)


class Fp8Producer(Producer):
    """Stages of 128 channels, block by block of one part after the other."""

    modes = 2
    loop: Fp8Mainloop

    def _pitch(self) -> Int64:
        return Int64(self.mA.stride[0])

    def place(self, k: Int32) -> tuple[Int32, ...]:
        each = (self.mA.shape[1] + (BLOCK - 1)) // BLOCK
        # There are two parts at most: a comparison in place of a division.
        part = cutlass.select_(k >= each, Int32(1), Int32(0))
        return k - part * each, part

    def copy(self, to: Int32, source: Int64, k: Int32) -> None:
        """Start the copy of a piece; zeros past the last channel, where memory holds other rows."""
        # `k` counts the blocks of all parts: gathered rows have one, or this would be another's
        # end.
        left = self.mA.shape[1] - k * BLOCK
        size = cutlass.select_(self.thread % 8 * _CHUNK < left, Int32(_CHUNK), Int32(0))
        ptx.cp_async_or_zero(to, source + k * BLOCK, size)

    @cute.jit
    def copied(self, state: State, k: Int32) -> None:
        """Arrive for the block `copies_in_flight` before, whose copies have landed.

        cp.async writes through the generic proxy, wgmma reads through the async one. A fence in the
        multiplying warps would wait for the scales that they have in flight: so the copiers fence,
        which takes a wait for their copies in place of `cp.async.mbarrier.arrive`.
        """
        cute.arch.cp_async_commit_group()
        # Before, nothing has landed for sure. Each thread waits for its own copies alone: that is
        # why full counts all 128 of them.
        if k >= self.loop.copies_in_flight:
            cute.arch.cp_async_wait_group(self.loop.copies_in_flight)
            self._landed(state, self.loop.copies_in_flight)

    @cute.jit
    def finish(self, state: State, blocks: Int32) -> None:
        if cutlass.const_expr(self.loop.gather):
            # `state` is past the last block. The oldest copies first, since a group of wgmma waits
            # for their stage; a tile of one block has no second one in flight.
            for left in cutlass.range_constexpr(self.loop.copies_in_flight, 0, -1):
                if blocks >= left:
                    cute.arch.cp_async_wait_group(left - 1)
                    self._landed(state, left)

    def _landed(self, state: State, before: int) -> None:
        # Before the arrival: who waits at full may read by wgmma at once. Without it wgmma could
        # read what the stage held before.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(self.ring.earlier_full_barrier(state, before))


def activations(
    pointer: cute.Pointer, rows: Int32, each: Int32, parts: Int32, pitch: Int32 | None = None
) -> cute.Tensor:
    """[rows, channels of a part, parts], `each` a multiple of 64; `pitch`, between rows, of 16."""
    # Divisibility in 16 bytes, which TMA requires, has to be known when the kernel is compiled.
    each = cute.assume(each, divby=64)
    wide = cute.assume(Int64(each), divby=64)
    if pitch is None:
        row = cute.assume(Int64(each) * Int64(parts), divby=64)
    else:
        row = cute.assume(Int64(pitch), divby=16)
    return cute.make_tensor(pointer, cute.make_layout((rows, each, parts), stride=(row, 1, wide)))


def weights(pointer: cute.Pointer, N: Int32, each: Int32, parts: Int32, L: Int32) -> cute.Tensor:
    """[N, channels of a part, parts, L] over contiguous [L, N, parts * each]."""
    each = cute.assume(each, divby=64)
    wide = cute.assume(Int64(each), divby=64)
    pitch = cute.assume(Int64(each) * Int64(parts), divby=64)
    plane = cute.assume(Int64(N) * Int64(each) * Int64(parts), divby=64)
    shape, stride = (N, each, parts, L), (pitch, 1, wide, plane)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def operand_scales(a: Rows, b: Weights, num_gate_parts: int) -> tuple[Any, ...]:
    """Scales of A [rows, K blocks], of B [N blocks (a gate half), K blocks, L], and an opaque 0."""
    # Shapes of 1: only strides are used (`address`), and the number of B's blocks.
    of_rows = cute.make_layout((1, 1), stride=(a.scale_row, a.scale_block))
    of_weights = cute.make_layout((b.blocks, 1, 1), stride=(b.scale_n, b.scale_k, b.scale_expert))
    half = b.blocks // 2 if num_gate_parts == 2 else None
    tensors = cute.make_tensor(a.scale, of_rows), cute.make_tensor(b.scale, of_weights)
    return *tensors, half, Int32(0)
