"""Main loop: one warp group loads stages, two warp groups multiply them with wgmma.

For a tile of the rows of one expert, `acc[m, n]` is the sum over k of `A[row + m, k]` times
`B[expert][n, k]`, in fp32. A is [rows, K] with K contiguous, its rows either consecutive (TMA) or
picked by an index (cp.async). B is [N, K] per expert with K contiguous, or N contiguous (the
weights read transposed); the expert is a coordinate of B's TMA descriptor. B's columns come in two
halves, the second at an offset of `half_offset` columns: side by side, or the gate's and those of
the linear half.

The two multiplying warp groups either share a tile, 64 of its 128 rows each, or alternate on whole
tiles (`pingpong`), so that one multiplies while the other stores. Rows and columns past the end of
a tensor are read as 0, rows past the end of the expert are whatever follows: epilogues drop both.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from phalanx.kernels.sm90.gemm.ring import Ring, State
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights, array, matrix, stacked, struct
from phalanx.kernels.sm90.jit import ptx

GROUP_THREADS = 128
MMA_GROUPS = 2
THREADS = GROUP_THREADS * (1 + MMA_GROUPS)
TILE_ROWS, DEPTH = 128, 64
ROW_BYTES = 2 * DEPTH  # bytes of a row of a stage, in bf16 and in FP8: the swizzle's 128
_CHUNK = 16  # bytes of a cp.async; 8 of them are a row of a stage of A
_PASSES = TILE_ROWS * 8 // GROUP_THREADS
_ATOM = 64  # rows of a wgmma
_ORDER = 3
"""First of the two named barriers that order the warp groups at the tensor cores, like CUTLASS's
OrderedSequenceBarrier; 0 is `sync_threads`'s."""


@dataclass(frozen=True)
class Mainloop:
    """Tile sizes and all that follows from them. Used while tracing, on host and device side."""

    columns: int  # columns of a tile: 128, 192 or 256
    pingpong: bool = False
    b_transposed: bool = False  # B is stored [K, N] per expert
    gather: bool = False  # a's rows are picked by an index
    stages: int = 4

    def __post_init__(self) -> None:
        if self.columns not in (128, 192, 256):
            raise ValueError(f"columns={self.columns}: tiles have 128, 192 or 256 columns")
        if self.pingpong and self.columns > 192:
            raise ValueError("a warp group alone holds at most 128 x 192 accumulators")

    @property
    def types(self) -> tuple[Any, Any]:
        return BFloat16, BFloat16

    @property
    def depth(self) -> int:
        return 8 * ROW_BYTES // self.types[0].width

    @property
    def registers(self) -> tuple[int, int]:
        # setmaxnreg takes registers from a pool of 168 * 384 that the CTA was launched with: a pair
        # that asks for more, such as 48 and 232, would wait for ever. Gathering warps hold 8 source
        # addresses of 64 bits each.
        return (56, 224) if self.gather else (40, 232)

    @property
    def warps(self) -> int:
        return 4 if self.pingpong else 8

    @property
    def group_rows(self) -> int:
        return TILE_ROWS if self.pingpong else TILE_ROWS // MMA_GROUPS

    @property
    def stage_bytes(self) -> int:
        return ROW_BYTES * (TILE_ROWS + self.columns)

    @property
    def box(self) -> int:
        # Transposed, columns are contiguous, and a box is as wide as the swizzle, 128 bytes.
        return 64 if self.b_transposed else self.columns // 2

    def blocks(self, mA: cute.Tensor) -> Int32:
        """Stages of a tile, from A as `tma` takes it."""
        return mA.shape[1] // DEPTH

    def tiled_mma(self) -> cute.TiledMma:
        major = OperandMajorMode.MN if self.b_transposed else OperandMajorMode.K
        # An atom is 64 rows of one warp group. Two groups side by side share a tile of 128 rows;
        # with ping-pong a group repeats the atom.
        return hopper.make_trivial_tiled_mma(
            *self.types,
            OperandMajorMode.K,
            major,
            Float32,
            (1 if self.pingpong else MMA_GROUPS, 1, 1),
            tiler_mn=(64, self.columns),
        )

    def smem_layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        a = hopper.make_smem_layout_a(
            *(LayoutEnum.ROW_MAJOR, (TILE_ROWS, self.columns, self.depth)),
            *(self.types[0], self.stages),
        )
        return a, self._layout_b(self.columns, self.stages)

    def box_layout(self) -> cute.ComposedLayout:
        return self._layout_b(self.box, self.stages * self.columns // self.box)

    def _layout_b(self, columns: int, count: int) -> cute.ComposedLayout:
        order = LayoutEnum.COL_MAJOR if self.b_transposed else LayoutEnum.ROW_MAJOR
        tile = (TILE_ROWS, columns, self.depth)
        return hopper.make_smem_layout_b(order, tile, self.types[1], count)

    def operands(
        self, a: Rows, b: Weights, num_gate_parts: int
    ) -> tuple[cute.Tensor, cute.Tensor, Any]:
        """Host side: A and B as `tma` takes them, and their scales, of which bf16 has none."""
        of_a, of_b = self.types
        return (
            matrix(cute.recast_ptr(a.data, dtype=of_a), a.rows, a.channels),
            stacked(
                cute.recast_ptr(b.data, dtype=of_b),
                *(b.columns, b.channels, b.experts),
                self.b_transposed,
            ),
            None,
        )

    def tma(self, mA: cute.Tensor, mB: cute.Tensor) -> tuple[Any, Any, Any, Any]:
        """Host side: atom and tensor of A [rows, K], then of B [N, K, experts]."""
        # Descriptors cover whole tensors and never change: rows and expert are coordinates. So a
        # launch does not depend on the numbers of rows.
        op = cpasync.CopyBulkTensorTileG2SOp()
        layout_a = cute.slice_(self.smem_layouts()[0], (None, None, 0))
        a = cpasync.make_tiled_tma_atom(op, mA, layout_a, (TILE_ROWS, self.depth))
        layout_b = cute.slice_(self.box_layout(), (None, None, 0))
        b = cpasync.make_tiled_tma_atom(op, mB, layout_b, (self.box, self.depth))
        return a[0], a[1], b[0], b[1]

    def storage(self) -> Any:
        layout_a, layout_b = self.smem_layouts()
        return struct(
            ring=Ring.fields(self.stages),
            a=array(self.types[0], cute.cosize(layout_a), 1024),
            b=array(self.types[1], cute.cosize(layout_b), 1024),
        )

    def ring(self, storage: Any) -> Ring:
        # cp.async of a gathered A arrive beside TMA of B at the same barrier.
        copiers = GROUP_THREADS if self.gather else 0
        arriving = self.stage_bytes - (ROW_BYTES * TILE_ROWS if self.gather else 0)
        return Ring(storage.ring, self.stages, arriving, copiers, self.warps)

    def producer(self, *args: Any) -> "Producer":
        return Producer(self, *args)

    def mma_consumer(
        self, storage: Any, tiled_mma: cute.TiledMma, group: Int32, *scales: Any
    ) -> Any:
        return MmaConsumer(self, storage, tiled_mma, group)


class Producer:
    """Loading side: one warp, or all warps of the group if rows are gathered."""

    modes: ClassVar[int] = 1  # modes of the operands' tensors that the contraction takes

    def __init__(self, loop: Mainloop, storage: Any, tma: Any, mA: cute.Tensor, index: Any) -> None:
        self.loop, self.ring = loop, loop.ring(storage)
        self.atom_a, self.tensor_a, self.atom_b, self.tensor_b = tma
        self.mA, self.index = mA, index
        layout_a, layout_b = loop.smem_layouts()[0], loop.box_layout()
        self.a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        self.b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        # For cp.async: 8 threads copy the 128 bytes of a row, 16 rows at a time.
        self.thread = cute.arch.thread_idx()[0] % GROUP_THREADS
        self.leads = cute.arch.make_warp_uniform(self.thread // 32) == 0
        row, chunk = self.thread // 8, self.thread % 8
        # Swizzle of 128 bytes, by hand: 16-byte chunk c of row r lies at chunk c ^ (r % 8), so that
        # the 8 threads of a row, and wgmma later, touch different banks.
        self.to = ptx.address(storage.a.data_ptr()) + row * 128 + ((chunk ^ (row % 8)) * _CHUNK)

    @cute.jit
    def sources(self, row: Int32, end: Int32) -> tuple[Int64, ...]:
        """Global addresses of this thread's 16-byte piece of each of its rows; only if gathered."""
        addresses = []
        if cutlass.const_expr(self.loop.gather):
            base = self.mA.iterator.toint() + self.thread % 8 * _CHUNK
            for p in cutlass.range_constexpr(_PASSES):
                at = row + self.thread // 8 + p * (GROUP_THREADS // 8)
                # Rows past the expert's end repeat its last one: the index there may be anything.
                picked = self.index[cutlass.min(at, end - 1)]
                addresses.append(base + Int64(picked) * self._pitch())
        return tuple(addresses)

    def _pitch(self) -> Int64:
        return 2 * Int64(self.mA.shape[1])

    def place(self, k: Int32) -> tuple[Int32, ...]:
        """Coordinates of block k in the modes of the contraction."""
        return (k,)

    def copy(self, to: Int32, source: Int64, k: Int32) -> None:
        ptx.cp_async(to, source + k * ROW_BYTES)

    @cute.jit
    def __call__(
        self,
        state: State,
        sources: tuple[Int64, ...],
        row: Int32,
        column: Int32,
        expert: Int32,
        half_offset: Int32,
        begin: Int32,
        end: Int32,
    ) -> State:
        """Load blocks begin .. end - 1 of the contraction for a tile: first row of A, first column
        of B's first half, expert, and columns from that half to the second one."""
        to_a, from_a = self._a(row)
        # Partitions are made once a tile; blocks of the contraction only pick a coordinate.
        boxes = self._boxes(column, expert, half_offset)
        for k in cutlass.range(begin, end, unroll=1):
            # Every loading warp waits for itself, as each writes to the stage: they need no barrier
            # among them.
            self.ring.producer_acquire(state)
            if self.leads:
                self.ring.producer_arrive_and_expect_tx(state)
                # All boxes of a stage complete on its full barrier, which expects their bytes
                # together.
                self._send_b(boxes, k, state)
                if cutlass.const_expr(not self.loop.gather):
                    cute.copy(
                        self.atom_a,
                        from_a[(None, *self.place(k))],
                        to_a[(None, state.index)],
                        tma_bar_ptr=self.ring.full_barrier(state),
                    )
            if cutlass.const_expr(self.loop.gather):
                to = self.to + state.index * (TILE_ROWS * ROW_BYTES)
                for p in cutlass.range_constexpr(_PASSES):
                    self.copy(to + p * (GROUP_THREADS // 8 * ROW_BYTES), sources[p], k)
                self.copied(state, k)
            state.advance()
        return state

    def copied(self, state: State, k: Int32) -> None:
        """Arrive at the full barrier when this thread's copies of block k have landed."""
        # noinc: the arrival is one of those that the barrier was initialised with.
        cute.arch.cp_async_mbarrier_arrive_noinc(self.ring.full_barrier(state))

    def finish(self, state: State, blocks: Int32) -> None:
        """Hook after the last of a tile's `blocks`; nothing to do in bf16."""

    def _a(self, row: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Destination and source of A's tiles for the rows from `row` on: (box, stage | k)."""
        shifted = cute.domain_offset((row, *[0] * self.modes), self.tensor_a)
        every = [None] * self.modes
        tiles = cute.local_tile(shifted, (TILE_ROWS, self.loop.depth), (0, *every))
        return _partition(self.atom_a, self.a, tiles)

    def _boxes(
        self, column: Int32, expert: Int32, half_offset: Int32
    ) -> list[tuple[Any, Any, Any]]:
        loop, parts = self.loop, []
        count = loop.columns // loop.box
        half = loop.columns // 2
        for number in range(count):
            inside = number * loop.box
            at = column + inside
            if inside >= half:
                at = at + (half_offset - half)
            shifted = cute.domain_offset((at, *[0] * self.modes, 0), self.tensor_b)
            every = [None] * self.modes
            tiles = cute.local_tile(shifted, (loop.box, loop.depth), (0, *every, expert))
            parts.append((number, *_partition(self.atom_b, self.b, tiles)))
        return parts

    def _send_b(self, boxes: list[tuple[Any, Any, Any]], k: Int32, state: State) -> None:
        count = self.loop.columns // self.loop.box
        for number, to_b, from_b in boxes:
            cute.copy(
                self.atom_b,
                from_b[(None, *self.place(k))],
                to_b[(None, state.index * count + number)],
                tma_bar_ptr=self.ring.full_barrier(state),
            )


def _partition(atom: Any, smem: cute.Tensor, gmem: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    one = cute.make_layout(1)
    return cpasync.tma_partition(
        atom, 0, one, cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    )


class MmaConsumer:
    """Side of a multiplying warp group. `acc` holds its part of the tile after a call. A thread's
    accumulators, flat: 4 * (columns // 8) for each 64 rows; there, for each 8 columns, two
    neighbours in row lane // 4 of the warp's 16 and two 8 rows below."""

    def __init__(
        self, loop: Mainloop, storage: Any, tiled_mma: cute.TiledMma, group: Int32
    ) -> None:
        self.loop, self.ring = loop, loop.ring(storage)
        self.tiled_mma, self.group = tiled_mma, group
        layout_a, layout_b = loop.smem_layouts()
        a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        mma = tiled_mma.get_slice(0 if loop.pingpong else group * GROUP_THREADS)
        # Fragments of operands are descriptors of shared memory: wgmma reads the stages itself.
        self.a = tiled_mma.make_fragment_A(mma.partition_A(a))
        self.b = tiled_mma.make_fragment_B(mma.partition_B(b))
        shape = tiled_mma.partition_shape_C((TILE_ROWS, loop.columns))
        self.acc = cute.make_rmem_tensor(shape, Float32)
        if loop.pingpong:  # the first 64 rows alone
            top = cute.local_tile(a, (_ATOM, DEPTH, loop.stages), (0, 0, 0))
            self.top_a = tiled_mma.make_fragment_A(mma.partition_A(top))
            self.top_mma = loop.tiled_mma()  # a second one, as `set` in `_block` changes it
            shape = tiled_mma.partition_shape_C((_ATOM, loop.columns))
            self.top_acc = cute.make_tensor(self.acc.iterator, cute.make_layout(shape))

    @cute.jit
    def start(self) -> None:
        """Ping-pong: let group 0 multiply first."""
        # Every wait at an order barrier takes 128 arrivals of the other group; the first one of
        # group 0 would have none.
        if cutlass.const_expr(self.loop.pingpong):
            if self.group == 1:
                self._order_barrier(0).arrive()

    @cute.jit
    def __call__(
        self, first: Int32, blocks: Int32, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> None:
        """Multiply `blocks` >= 1 stages, from block number `first` on, into a fresh accumulator.
        Blocks of 64 rows of the tile at `row` that lie past `end` are skipped. `column` and
        `expert` are used where operands have scales."""
        rows = end - row
        if cutlass.const_expr(self.loop.pingpong):
            self._order_barrier(self.group).arrive_and_wait()
            if rows > _ATOM:
                self._multiply(first, blocks, True)
            else:
                self._multiply(first, blocks, False)
        else:
            if rows > self.group * _ATOM:
                self._multiply(first, blocks, True)
            else:
                # The stages still have to be released: their empty barriers count both groups.
                for k in cutlass.range(blocks, unroll=1):
                    self.ring.consumer_release(self.ring.consumer_wait_block(first + k))

    @cute.jit
    def _multiply(self, first: Int32, blocks: Int32, whole: cutlass.Constexpr) -> None:
        before = self._block(first, True, whole)
        for k in cutlass.range(1, blocks, unroll=1):
            stage = self._block(first + k, False, whole)
            # One wgmma group stays in flight: the one before it has ended, so its stage is free.
            warpgroup.wait_group(1)
            self.ring.consumer_release(before)
            before = stage
        if cutlass.const_expr(self.loop.pingpong):
            # All wgmma of the tile are issued: the other group's queue up behind them while this
            # group waits for its last one and stores.
            self._order_barrier(1 - self.group).arrive()
        warpgroup.wait_group(0)
        self.ring.consumer_release(before)

    def _order_barrier(self, group: Int32 | int) -> pipeline.NamedBarrier:
        return pipeline.NamedBarrier(barrier_id=_ORDER + group, num_threads=2 * GROUP_THREADS)

    def _block(self, number: Int32, fresh: bool, whole: bool) -> Int32:
        stage = self.ring.consumer_wait_block(number)
        if self.loop.gather:
            # cp.async writes through the generic proxy, wgmma reads through the async one.
            cute.arch.fence_proxy("async.shared", space="cta")
        # In every block: with two accumulators (128 rows a group) ptxas would otherwise serialise
        # all wgmma of the loop.
        warpgroup.fence()
        mma, acc, a = self.tiled_mma, self.acc, self.a
        if not whole:
            mma, acc, a = self.top_mma, self.top_acc, self.top_a
        for k in range(cute.size(a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, not (fresh and k == 0))
            at = (None, None, k, stage)
            cute.gemm(mma, acc, a[at], self.b[at], acc)
        warpgroup.commit_group()
        return stage
