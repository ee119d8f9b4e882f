"""A weight gradient of operands in bf16: how its stages are loaded, and multiplied.

For a tile, acc[o, i] = sum over the rows s of one expert of d[s, o] * v[s, i], in fp32. Both
operands are stored by rows, so wgmma reads both transposed. A stage holds 64 rows: 128 columns of
d and up to 256 of v, in boxes of 64 columns with 128 bytes a row, swizzled. Stages are multiplied
whole: the loading warps make rows after the expert's last one zero in both operands.

One loader walks the stages of a tile (`RowLoads`), from one of two sources:

    TmaRows        rows in the experts' order, by TMA of one warp, from whichever row an expert
                   begins at. The last stage of an expert then also holds rows that follow its own:
                   the next expert's, or padding that may be NaN. A second warp waits for such a
                   stage and clears them (`Clear`)
    GatheredRows   one operand's rows are picked by an index: cp.async of four warps; the other
                   operand's come by TMA. In a last stage both come by cp.async, with zeros after
                   the expert's end, where the index is not read

Roles and the way of a stage (the kernel's are in `kernel`; `ContractionRing` has the barriers):

    TmaRows        warp 0 --TMA--> tma_done --warp 1: zeros, fence--> full    an expert's last stage
                   warp 0 --TMA-------------------------------------> full    all others
    GatheredRows   warp 0: TMA, or an arrival without bytes --------> full    1 +
                   128 threads: cp.async, arriving as it lands -----> full    128
    both           full --> groups 1 and 2: wgmma --8 warps, once it has ended--> empty --> loaders
                   group 1: wgmma issued --leader_started--> group 2, SKEW stages behind
"""

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, MMA_GROUPS, TILE_ROWS
from phalanx.kernels.sm90.gemm.ring import State
from phalanx.kernels.sm90.gemm.tensors import array, struct, vector
from phalanx.kernels.sm90.gemm.tile_scheduler import unpack
from phalanx.kernels.sm90.wgrad.kernel import Factor

BOX = 64  # columns of a box, and rows of a stage
BOX_BYTES = 2 * BOX * BOX
D, V = 0, 1  # the two operands
SKEW = 2  # stages by which the first group leads: one group stores while the other one multiplies
_CHUNK = 8  # elements of the 16 bytes that a thread copies or clears at a time
_LANES = BOX // _CHUNK  # lanes that share a row of a box; a warp covers 4 rows
_WARP_ROWS = BOX // 4  # rows of a stage that each of the four warps gathers
_TOGETHER = 32 // _LANES

type Parts = list[tuple[Any, Any, Any]]  # TMA atom, destination and source of each operand


def blocks_of(rows: Int32) -> Int32:
    """Number of stages that hold `rows` rows."""
    return (rows + (BOX - 1)) // BOX


@dataclass(frozen=True)
class ContractionRing:
    """The four barriers of each stage, as seen by every thread; `init_barriers` comes first.

    A phase ends with so many arrivals:

        full            1, of the TMA warp with its bytes, or of the warp that cleared the stage;
                        + 128 with a gathered operand, one of each thread whose cp.async landed
        empty           8, of the multiplying warps
        tma_done        1, of the TMA warp with its bytes: in place of full, for stages to be
                        cleared
        leader_started  1, of a thread of the first group
    """

    loop: "Contraction"
    storage: Any

    @property
    def full(self) -> cute.Pointer:
        return self.storage.barriers.data_ptr()

    @property
    def empty(self) -> cute.Pointer:
        return self.full + self.loop.stages

    @property
    def tma_done(self) -> cute.Pointer:
        """TMA has filled a stage in which rows after an expert's last one have to be cleared."""
        return self.full + 2 * self.loop.stages

    @property
    def leader_started(self) -> cute.Pointer:
        """The first group has issued the stage's wgmma: only the skew depends on it."""
        return self.full + 3 * self.loop.stages

    def init_barriers(self) -> None:
        """One warp: initialise the barriers; a fence and a barrier of the CTA follow."""
        # cp.async arrives once a thread: each thread's copies complete by themselves.
        fillers = 1 if self.loop.gathered is None else 1 + GROUP_THREADS
        with cute.arch.elect_one():
            for stage in range(self.loop.stages):
                cute.arch.mbarrier_init(self.full + stage, fillers)
                cute.arch.mbarrier_init(self.empty + stage, 4 * MMA_GROUPS)
                cute.arch.mbarrier_init(self.tma_done + stage, 1)
                cute.arch.mbarrier_init(self.leader_started + stage, 1)

    def producer_acquire(self, state: State) -> None:
        # A producer state starts in phase 1: the first round over the stages does not wait.
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase)

    def consumer_wait(self, state: State) -> None:
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)

    def consumer_release(self, state: State) -> None:
        # One arrival a warp: the wait for wgmma before it covers all of its lanes.
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + state.index)


@dataclass(frozen=True)
class Contraction:
    """A `WgradMath` of operands in bf16."""

    columns: int  # columns of a tile, of I: 128, 192 or 256
    gathered: int | None = None  # operand, D or V, whose rows are picked by an index, if any
    stages: int = 1

    def __post_init__(self) -> None:
        if self.columns not in (128, 192, 256):
            raise ValueError(f"columns={self.columns}: tiles have 128, 192 or 256 columns")
        if self.gathered not in (None, D, V):
            raise ValueError(f"gathered={self.gathered}: operand {D} (d), {V} (v) or None")

    @property
    def tile(self) -> tuple[int, int, int]:
        return TILE_ROWS, self.columns, BOX

    @property
    def boxes(self) -> tuple[int, int]:
        return TILE_ROWS // BOX, self.columns // BOX

    @property
    def stage_bytes(self) -> int:
        return BOX_BYTES * sum(self.boxes)

    @property
    def registers(self) -> tuple[int, int]:
        # As of `gemm.mainloop`: more than these would wait for ever at setmaxnreg.
        return (40, 232) if self.gathered is None else (56, 224)

    @property
    def loading_warps(self) -> int:
        """One for TMA and one to clear; or four that gather."""
        return 2 if self.gathered is None else 4

    def operands(
        self, d: Factor, v: Factor, index: cute.Pointer
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """d and v as [channels, rows], and the index of the gathered one; TMA of the others."""
        # The gathered operand has another number of rows, which nothing reads.
        S = v.tokens if self.gathered == D else d.tokens
        mD, mV = (
            cute.make_tensor(
                cute.recast_ptr(x.data, dtype=BFloat16),
                cute.make_layout(
                    (cute.assume(x.channels, divby=BOX), S),
                    stride=(1, cute.assume(Int64(x.channels), divby=BOX)),
                ),
            )
            for x in (d, v)
        )
        return self.tma(mD, mV), (mD, mV, vector(index, S))

    store_for_each_tile: ClassVar[bool] = False

    def output_mma(self, tiled_mma: cute.TiledMma) -> cute.TiledMma:
        return tiled_mma

    def shape(self, operands: tuple[Any, ...]) -> tuple[Int32, Int32]:
        return operands[0].shape[0], operands[1].shape[0]

    def init_barriers(self, storage: Any) -> None:
        ContractionRing(self, storage).init_barriers()

    def loader(
        self, storage: Any, tma: tuple[Any, ...], operands: tuple[Any, ...], warp: Int32
    ) -> "RowLoads":
        whole = TmaRows(self, storage, tma)
        if self.gathered is None:
            return RowLoads(self, storage, whole)
        return RowLoads(self, storage, GatheredRows(self, storage, operands, whole, warp))

    def clear(self, storage: Any) -> Any:
        return Clear(self, storage)

    def multiplier(
        self, storage: Any, tiled_mma: cute.TiledMma, operands: tuple[Any, ...]
    ) -> "ContractionMma":
        return ContractionMma(self, storage, tiled_mma)

    def tiled_mma(self) -> cute.TiledMma:
        """Two warp groups, each 64 rows of the tile and all columns."""
        # Both operands are stored by rows, the contraction: wgmma transposes both (MN-major).
        return hopper.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.MN,
            OperandMajorMode.MN,
            Float32,
            (MMA_GROUPS, 1, 1),
            tiler_mn=(64, self.columns),
        )

    def smem_layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Stages of d and v in shared memory: (column, row, stage), box after box."""
        # Columns are contiguous: a box has 64 of them, the 128 bytes of a swizzled row.
        d = hopper.make_smem_layout_a(LayoutEnum.COL_MAJOR, self.tile, BFloat16, self.stages)
        v = hopper.make_smem_layout_b(LayoutEnum.COL_MAJOR, self.tile, BFloat16, self.stages)
        return d, v

    def tma(self, mD: cute.Tensor, mV: cute.Tensor) -> tuple[Any, ...]:
        """Host side: atom and tensor of d [O, rows], then of v [I, rows], if not gathered."""
        descriptors: list[Any] = []
        for which, tensor in ((D, mD), (V, mV)):
            if which != self.gathered:
                layout = cute.slice_(self.smem_layouts()[which], (None, None, 0))
                op = cpasync.CopyBulkTensorTileG2SOp()
                atom = cpasync.make_tiled_tma_atom(op, tensor, layout, (self.tile[which], BOX))
                descriptors += [atom[0], atom[1]]
        return tuple(descriptors)

    def storage(self) -> Any:
        d, v = self.smem_layouts()
        return struct(
            barriers=array(cutlass.Int64, 4 * self.stages),
            d=array(BFloat16, cute.cosize(d), 1024),
            v=array(BFloat16, cute.cosize(v), 1024),
        )

    def state(self, user: pipeline.PipelineUserType) -> State:
        return pipeline.make_pipeline_state(user, self.stages)


class RowLoads:
    """Side of a loading warp: which blocks of an expert's rows are loaded when. A source fills a
    stage, `fill`; with an index it finds the rows of a block ahead, `look_up`."""

    def __init__(self, loop: Contraction, storage: Any, source: Any) -> None:
        """`source`: a `TmaRows` or `GatheredRows`."""
        self.loop, self.ring, self.source = loop, ContractionRing(loop, storage), source

    def state(self) -> State:
        return self.loop.state(pipeline.PipelineUserType.Producer)

    def begin(self, row: Int32, stop: Int32, position: Int32) -> tuple[Any, ...]:
        """Start a tile, of two halves: its expert's first row and number of rows, tile indices of O
        and of I, the number of blocks, and the sources of the first one."""
        rows = stop - row
        look_up, first = self.source.look_up, Int32(0)
        return row, rows, unpack(position), blocks_of(rows), look_up(row, rows, first)

    def half(
        self, state: State, tile: tuple[Any, ...], second: bool
    ) -> tuple[State, tuple[Any, ...]]:
        row, rows, at, blocks, picked = tile
        half = (blocks + 1) // 2
        begin, end = (half, blocks) if second else (Int32(0), half)
        state, picked = self.load(state, (row, rows, at), begin, end, picked)
        return state, (row, rows, at, blocks, picked)

    @cute.jit
    def load(
        self, state: State, tile: Any, begin: Int32, end: Int32, picked: Int32
    ) -> tuple[State, Int32]:
        """Load blocks begin .. end - 1 of a tile: its expert's first row and number of rows, and
        tile indices of O and of I; `picked` are the sources of block `begin`. Returns `state` past
        these blocks, and the sources of block `end`."""
        # Once for half a tile; a block then only picks a coordinate.
        parts = self.source.partition(tile[0], tile[2])
        for k in cutlass.range(begin, end, unroll=1):
            # By each loading warp for itself: with an index all four write to the stage, and no
            # barrier joins them. TMA may write over zeros of `Clear`, whose fence came before the
            # stage was full.
            self.ring.producer_acquire(state)
            picked = self.source.fill(parts, state.index, k, tile, picked)
            state.advance()
        return state, picked


class TmaRows:
    """Whole boxes of the operands that are not gathered, by TMA of one warp."""

    def __init__(self, loop: Contraction, storage: Any, tma: tuple[Any, ...]) -> None:
        self.loop, self.ring = loop, ContractionRing(loop, storage)
        self.which = [which for which in (D, V) if which != loop.gathered]
        self.atoms, self.tensors = tma[::2], tma[1::2]
        layouts = loop.smem_layouts()
        self.smem = [
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip((storage.d, storage.v), layouts, strict=True)
        ]
        self.bytes = BOX_BYTES * sum(loop.boxes[which] for which in self.which)

    def look_up(self, row: Int32, rows: Int32, k: Int32) -> Int32:
        """No index."""
        return Int32(0)

    def partition(self, row: Int32, tiles: tuple[Int32, Int32]) -> Parts:
        """Atom, destination (box, stage) and source (box, block from `row` on) of each operand."""
        parts = []
        for which, atom, tensor in zip(self.which, self.atoms, self.tensors, strict=True):
            # Rows of an expert begin anywhere: an offset of TMA's coordinate, without padding.
            shifted = cute.domain_offset((0, row), tensor)
            box = (self.loop.tile[which], BOX)
            blocks = cute.local_tile(shifted, box, (tiles[which], None))
            smem, gmem = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(self.smem[which], 0, 2),
                cute.group_modes(blocks, 0, 2),
            )
            parts.append((atom, smem, gmem))
        return parts

    def issue(self, parts: Parts, k: Int32, index: Int32, barrier: cute.Pointer) -> None:
        # One operation arrives and adds the bytes: between two the phase could end without them.
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.bytes)
        for atom, smem, gmem in parts:
            cute.copy(atom, gmem[(None, k)], smem[(None, index)], tma_bar_ptr=barrier)

    @cute.jit
    def fill(self, parts: Parts, stage: Int32, k: Int32, tile: Any, picked: Int32) -> Int32:
        """Load block k of a tile, as of `load`, to a stage; returns `picked`."""
        # Barriers of a kind lie side by side, so that an offset of 2 * stages leads from full to
        # tma_done.
        barrier, (_, rows, _) = stage, tile
        # The expert's last stage completes tma_done instead of full: `Clear` comes between.
        if (k + 1) * BOX > rows:
            barrier += 2 * self.loop.stages
        self.issue(parts, k, stage, self.ring.full + barrier)
        return picked


class GatheredRows:
    """cp.async by four warps: rows picked by an index, and both operands of an expert's last stage.
    A warp copies 16 rows of a stage, 4 rows of a box with an instruction. Lanes 0 to 15 hold the
    index of these rows, read one block ahead."""

    def __init__(
        self,
        loop: Contraction,
        storage: Any,
        operands: tuple[Any, ...],
        tma: TmaRows,
        warp: Int32,
    ) -> None:
        """`operands`: d and v as [columns, rows]; the index [S] is the gathered one's."""
        self.loop, self.ring = loop, ContractionRing(loop, storage)
        self.warp, self.tma, self.partition = warp, tma, tma.partition
        self.tensors, self.index = operands[:2], operands[2]
        self.lane = cute.arch.lane_idx()
        # Addresses, not tensors: cp.async takes them, and the swizzle is computed by hand.
        self.bases = (storage.d.data_ptr().toint(), storage.v.data_ptr().toint())

    @cute.jit
    def look_up(self, row: Int32, rows: Int32, k: Int32) -> Int32:
        """Source rows of this warp's rows in block k of the expert, one a lane; 0 past its end."""
        # Row r of the warp in lane r: the other 16 lanes hold nothing that is used.
        at = k * BOX + self.warp * _WARP_ROWS + self.lane
        picked = Int32(0)
        if self.lane < _WARP_ROWS and at < rows:
            picked = self.index[row + at]
        return picked

    @cute.jit
    def fill(self, parts: Parts, stage: Int32, k: Int32, tile: Any, picked: Int32) -> Int32:
        """Load block k to a stage, from the rows `picked`; returns those of the next block."""
        gathered, other = (D, V) if self.loop.gathered == D else (V, D)
        row, rows, tiles = tile
        full = self.ring.full + stage
        sources = picked
        # The index of the next block is read now, a block before it is used.
        picked = self.look_up(row, rows, k + 1)
        if (k + 1) * BOX > rows:
            # No TMA in the last stage: the arrival that full expects from it, without bytes.
            if self.warp == 0:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(full)
            plain = row + k * BOX + self.warp * _WARP_ROWS + self.lane
            self._copy(other, stage, tiles[other], plain, rows - k * BOX)
        else:
            if self.warp == 0:
                self.tma.issue(parts, k, stage, full)
        # All four warps copy; rows past the expert's end come as zeros.
        self._copy(gathered, stage, tiles[gathered], sources, rows - k * BOX)
        # Each thread's arrival comes when its own copies have landed; noinc: it is one of the 128
        # that the barrier was initialised for.
        cute.arch.cp_async_mbarrier_arrive_noinc(full)
        return picked

    @cute.jit
    def _copy(
        self, which: cutlass.Constexpr, stage: Int32, tile: Int32, source: Int32, valid: Int32
    ) -> None:
        """Copy this warp's rows of one operand to a stage; lane r holds the source of its row r.
        Rows from `valid` on are not the expert's, and become zero."""
        tensor, boxes = self.tensors[which], self.loop.boxes[which]
        width = tensor.shape[0]
        # 8 lanes have the 128 bytes of a row of a box; 4 rows go with each instruction.
        below, chunk = self.lane // _LANES, self.lane % _LANES
        column = tile * self.loop.tile[which]
        first = self.warp * _WARP_ROWS + below
        stage_at = self.bases[which] + stage * (boxes * BOX_BYTES) + first * (2 * BOX)
        for i in cutlass.range_constexpr(_WARP_ROWS // _TOGETHER):
            s = cute.arch.shuffle_sync(source, i * _TOGETHER + below)
            # Of 0 bytes nothing is read, whatever the address, and 16 zeros are written.
            bytes_ = cutlass.select_(first + i * _TOGETHER < valid, Int32(16), Int32(0))
            # Swizzle of 128 bytes: chunk c of row r lies at c ^ (r % 8); r % 8 is below, or below +
            # 4.
            swizzled = chunk ^ (below + i % 2 * _TOGETHER)
            to = stage_at + i * _TOGETHER * (2 * BOX) + swizzled * 16
            at = Int64(s) * width + (column + chunk * _CHUNK)
            from_ = tensor.iterator.toint() + at * (BFloat16.width // 8)
            for box in cutlass.range_constexpr(boxes):
                # A box lies inside the matrix or not, as its columns are a multiple of 64; outside
                # it is zero.
                inside = cutlass.select_(column + box * BOX < width, bytes_, Int32(0))
                cute.arch.inline_ptx(
                    "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                    read_only_args=[to + box * BOX_BYTES, from_ + box * (2 * BOX), inside],
                )


class Clear:
    """One warp that clears the rows after an expert's last one in stages that TMA filled."""

    def __init__(self, loop: Contraction, storage: Any) -> None:
        self.loop, self.ring = loop, ContractionRing(loop, storage)
        self.bases = (storage.d.data_ptr(), storage.v.data_ptr())

    def begin(self) -> tuple[Int32, Int32]:
        # Blocks of all tiles so far, and the phases of tma_done, whose first is 0.
        return Int32(0), Int32(0)

    @cute.jit
    def tile(self, carry: tuple[Int32, Int32], row: Int32, stop: Int32) -> tuple[Int32, Int32]:
        """Clear what follows the rows of a tile in its last stage, if they do not fill it."""
        filled, phases = carry
        # Counted for all tiles, as the loader counts stages, so that the last one is found here
        # too.
        filled += blocks_of(stop - row)
        left = (stop - row) % BOX
        if left != 0:
            phases = self(filled - 1, left, phases)
        return filled, phases

    @cute.jit
    def __call__(self, last: Int32, rows: Int32, phases: Int32) -> Int32:
        """Clear stage `last`, counted over all tiles, from its row `rows` on. Bit i of `phases`,
        returned for the next call, is the phase of tma_done[i], which only stages to be cleared
        complete."""
        index = last % self.loop.stages
        lane = cute.arch.lane_idx()
        # TMA's bytes have landed: it would otherwise write over the zeros.
        cute.arch.mbarrier_wait(self.ring.tma_done + index, (phases >> index) & 1)
        # A NaN of another expert times zero would be NaN: both operands are cleared.
        zero = cute.make_rmem_tensor(4, Float32)
        zero.fill(0.0)
        # 8 lanes a row of 128 bytes, in any order: zeros need no swizzle.
        for row in cutlass.range(rows + lane // _LANES, BOX, _TOGETHER, unroll=1):
            for base, boxes in zip(self.bases, self.loop.boxes, strict=True):
                # A stage is its boxes, one after the other, of 64 rows of 64 columns.
                at = (index * boxes * BOX + row) * BOX + lane % _LANES * _CHUNK
                for box in cutlass.range_constexpr(boxes):
                    chunk = cute.recast_ptr(base + (at + box * BOX * BOX), dtype=Float32).align(16)
                    cute.autovec_copy(zero, cute.make_tensor(chunk, 4))
        # Zeros of all lanes (generic proxy) become visible to wgmma (async proxy) before one
        # arrives.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.ring.full + index)
        return phases ^ (1 << index)


class ContractionMma:
    """Side of a multiplying warp group. `acc` holds its part of the tile after a call."""

    def __init__(self, loop: Contraction, storage: Any, tiled_mma: cute.TiledMma) -> None:
        self.loop, self.ring, self.tiled_mma = loop, ContractionRing(loop, storage), tiled_mma
        thread = cute.arch.thread_idx()[0] - GROUP_THREADS
        self.group = cute.arch.make_warp_uniform(thread // GROUP_THREADS)
        self.leads = thread == 0
        layout_d, layout_v = loop.smem_layouts()
        d = storage.d.get_tensor(layout_d.outer, swizzle=layout_d.inner)
        v = storage.v.get_tensor(layout_v.outer, swizzle=layout_v.inner)
        # As in `gemm.mainloop`, fragments of operands are descriptors of shared memory.
        mma = tiled_mma.get_slice(self.group * GROUP_THREADS)
        self.d = tiled_mma.make_fragment_A(mma.partition_A(d))
        self.v = tiled_mma.make_fragment_B(mma.partition_B(v))
        shape = tiled_mma.partition_shape_C((TILE_ROWS, loop.columns))
        self.tile = self.acc = cute.make_rmem_tensor(shape, Float32)

    def of_segment(self, tiled_mma: cute.TiledMma, operands: tuple[Any, ...]) -> "ContractionMma":
        # ACCUMULATE is set on an MMA while tracing, so segments have one each; the accumulators are
        # the same tensor.
        other = copy(self)
        other.tiled_mma = tiled_mma
        return other

    def begin(self) -> tuple[State, State]:
        user = pipeline.PipelineUserType.Consumer
        # Of the stage that is read next, and of the one that is released next.
        return self.loop.state(user), self.loop.state(user)

    def size(self, row: Int32, stop: Int32) -> Int32:
        return stop - row

    @cute.jit
    def __call__(
        self,
        states: tuple[State, State],
        row: Int32,
        rows: Int32,
        down: Int32,
        across: Int32,
        add: Any = False,
    ) -> tuple[State, State]:
        """Multiply the stages of `rows` >= 1 rows; `add` to the accumulator, or overwrite it."""
        read, free = states  # `free` is a stage behind `read`
        blocks = blocks_of(rows)
        self._wait_for_leader(read, blocks)
        # Orders the epilogue's reads of the accumulator before the wgmma that overwrite it.
        warpgroup.fence()
        self._block(read, add)
        read.advance()
        for _ in cutlass.range(1, blocks, unroll=1):
            self._block(read, True)
            read.advance()
            # One wgmma group stays in flight: the one before it has ended, so its stage is free.
            warpgroup.wait_group(1)
            self.ring.consumer_release(free)
            free.advance()
        warpgroup.wait_group(0)
        self.ring.consumer_release(free)
        free.advance()
        return read, free

    def advance(self, states: tuple[State, State], rows: Int32) -> tuple[State, State]:
        """States after an expert of `rows` rows, which a call has advanced."""
        return states

    @cute.jit
    def _block(self, state: State, add: Any) -> None:
        self.ring.consumer_wait(state)
        if cutlass.const_expr(self.loop.gathered is not None):
            # cp.async writes through the generic proxy, wgmma reads through the async one.
            cute.arch.fence_proxy("async.shared", space="cta")
        for k in cutlass.range_constexpr(cute.size(self.d, mode=[2])):
            # Only the first 16 rows of a tile may overwrite: what a segment before has summed
            # stays.
            adds = add if cutlass.const_expr(k == 0) else True
            self.tiled_mma.set(warpgroup.Field.ACCUMULATE, adds)
            at = (None, None, k, state.index)
            cute.gemm(self.tiled_mma, self.acc, self.d[at], self.v[at], self.acc)
        warpgroup.commit_group()
        # One thread of the first group: its wgmma are issued, which is all the second one waits
        # for.
        if self.leads:
            cute.arch.mbarrier_arrive(self.ring.leader_started + state.index)

    @cute.jit
    def _wait_for_leader(self, state: State, blocks: Int32) -> None:
        """Second group: wait until the first one has issued SKEW stages of the tile. One group
        keeps the tensor cores busy, so this costs nothing, and at the end of the tile the second
        one multiplies while the first one stores."""
        # The wait ends: the first group comes to this stage again only when this one has released
        # it, so that no phase is missed; the second group holds no stage here, and SKEW stages fit
        # in the ring. If it was ahead by nearly all stages it may pass at once, on the phase
        # before: that costs the skew of a tile, and no result.
        if self.group == 1:
            index = state.index + cutlass.min(blocks, SKEW) - 1
            phase = state.phase
            if index >= self.loop.stages:
                index -= self.loop.stages
                phase ^= 1
            cute.arch.mbarrier_wait(self.ring.leader_started + index, phase)
