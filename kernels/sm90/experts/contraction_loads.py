"""Loading warps of a weight gradient: from rows in global memory to stages of `contraction`.

Rows in the experts' order come by TMA, from whichever row an expert begins at. The last stage of an
expert then also holds rows that follow the expert's own: the next expert's, or padding that may be
NaN. A second warp waits for such a stage and clears these rows before it arrives at its full
barrier. Rows picked by an index come by cp.async from all four warps, which also bring both
operands of a last stage, with zeros for the rows after the expert's end; the index is not read
there.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, MMA_GROUPS
from phalanx.kernels.sm90.gemm.ring import State
from phalanx.kernels.sm90.gemm.tile_scheduler import unpack

MMA_WARPS = 4 * MMA_GROUPS
BOX = 64  # columns of a box, and rows of a stage
BOX_BYTES = 2 * BOX * BOX
D, V = 0, 1  # the two operands


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
        cleared leader_started  1, of a thread of the first group
    """

    loop: Any  # the `contraction.Contraction`
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
                cute.arch.mbarrier_init(self.empty + stage, MMA_WARPS)
                cute.arch.mbarrier_init(self.tma_done + stage, 1)
                cute.arch.mbarrier_init(self.leader_started + stage, 1)

    def producer_acquire(self, state: State) -> None:
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase)

    def consumer_wait(self, state: State) -> None:
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)

    def consumer_release(self, state: State) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + state.index)


_CHUNK = 8  # elements of the 16 bytes that a thread copies or clears at a time
_LANES = BOX // _CHUNK  # lanes that share a row of a box; a warp covers 4 rows
_WARP_ROWS = BOX // 4  # rows of a stage that each of the four warps gathers
_TOGETHER = 32 // _LANES


class RowLoads:
    """Base of the loading warps: which blocks of an expert's rows are loaded when."""

    def __init__(self, loop: Any, storage: Any) -> None:
        self.loop, self.ring = loop, ContractionRing(loop, storage)

    def state(self) -> State:
        return self.loop.state(pipeline.PipelineUserType.Producer)

    def begin(self, row: Int32, stop: Int32, position: Int32) -> tuple[Any, ...]:
        """Start a tile, of two halves: its expert's first row and number of rows, tile indices of O
        and of I, the number of blocks, and the sources of the first one."""
        rows = stop - row
        return row, rows, unpack(position), blocks_of(rows), self.look_up(row, rows, Int32(0))

    def half(
        self, state: State, tile: tuple[Any, ...], second: bool
    ) -> tuple[State, tuple[Any, ...]]:
        row, rows, at, blocks, picked = tile
        half = (blocks + 1) // 2
        begin, end = (half, blocks) if second else (Int32(0), half)
        state, picked = self.load(state, row, rows, at, begin, end, picked)
        return state, (row, rows, at, blocks, picked)

    def look_up(self, row: Int32, rows: Int32, k: Int32) -> Int32:
        return Int32(0)

    def load(self, *arguments: Any) -> Any:
        raise NotImplementedError


class TileLoads(RowLoads):
    """TMA by one warp: whole boxes of the operands that are not gathered."""

    def __init__(
        self,
        loop: Any,
        storage: Any,
        tma: tuple[Any, ...],
        operands: tuple[Any, ...],
        warp: Int32,
    ) -> None:
        super().__init__(loop, storage)
        self.which = [which for which in (D, V) if which != loop.gathered]
        self.atoms, self.tensors = tma[::2], tma[1::2]
        layouts = loop.smem_layouts()
        self.smem = [
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in zip((storage.d, storage.v), layouts, strict=True)
        ]
        self.bytes = BOX_BYTES * sum(loop.boxes[which] for which in self.which)

    def partition(self, row: Int32, tiles: tuple[Int32, Int32]) -> list[tuple[Any, Any, Any]]:
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

    def issue(
        self, parts: list[tuple[Any, Any, Any]], k: Int32, index: Int32, barrier: cute.Pointer
    ) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.bytes)
        for atom, smem, gmem in parts:
            cute.copy(atom, gmem[(None, k)], smem[(None, index)], tma_bar_ptr=barrier)

    @cute.jit
    def load(
        self,
        state: State,
        row: Int32,
        rows: Int32,
        tiles: tuple[Int32, Int32],
        begin: Int32,
        end: Int32,
        picked: Int32,
    ) -> tuple[State, Int32]:
        """Load blocks begin .. end - 1 of an expert's rows; `tiles` are tile indices of O and of I.
        Returns `state` past these blocks. `picked` is for `Gather`."""
        parts = self.partition(row, tiles)
        for k in cutlass.range(begin, end, unroll=1):
            self.ring.producer_acquire(state)
            barrier = state.index
            # The expert's last stage completes tma_done instead of full: `Clear` comes between.
            if (k + 1) * BOX > rows:
                barrier += 2 * self.loop.stages
            self.issue(parts, k, state.index, self.ring.full + barrier)
            state.advance()
        return state, picked


class Clear:
    """One warp that clears the rows after an expert's last one in stages that TMA filled."""

    def __init__(self, loop: Any, storage: Any) -> None:
        self.loop, self.ring = loop, ContractionRing(loop, storage)
        self.bases = (storage.d.data_ptr(), storage.v.data_ptr())

    def begin(self) -> tuple[Int32, Int32]:
        return Int32(0), Int32(0)

    @cute.jit
    def tile(self, carry: tuple[Int32, Int32], row: Int32, stop: Int32) -> tuple[Int32, Int32]:
        """Clear what follows the rows of a tile in its last stage, if they do not fill it."""
        filled, phases = carry
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
        cute.arch.mbarrier_wait(self.ring.tma_done + index, (phases >> index) & 1)
        # A NaN of another expert times zero would be NaN: both operands are cleared.
        zero = cute.make_rmem_tensor(4, Float32)
        zero.fill(0.0)
        # 8 lanes a row of 128 bytes, in any order: zeros need no swizzle.
        for row in cutlass.range(rows + lane // _LANES, BOX, _TOGETHER, unroll=1):
            for base, boxes in zip(self.bases, self.loop.boxes, strict=True):
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


class Gather(RowLoads):
    """cp.async by four warps: rows picked by an index, and both operands of an expert's last stage.
    A warp copies 16 rows of a stage, 4 rows of a box with an instruction. Lanes 0 to 15 hold the
    index of these rows, read one block ahead."""

    def __init__(
        self,
        loop: Any,
        storage: Any,
        tma: tuple[Any, ...],
        operands: tuple[Any, ...],
        warp: Int32,
    ) -> None:
        """As for `TileLoads`: d and v as [columns, rows]; the index [S] is the gathered one's."""
        super().__init__(loop, storage)
        self.warp, self.tma = warp, TileLoads(loop, storage, tma, operands, warp)
        self.tensors, self.index = operands[:2], operands[2]
        self.lane = cute.arch.lane_idx()
        self.bases = (storage.d.data_ptr().toint(), storage.v.data_ptr().toint())

    @cute.jit
    def look_up(self, row: Int32, rows: Int32, k: Int32) -> Int32:
        """Source rows of this warp's rows in block k of the expert, one a lane; 0 past its end."""
        at = k * BOX + self.warp * _WARP_ROWS + self.lane
        picked = Int32(0)
        if self.lane < _WARP_ROWS and at < rows:
            picked = self.index[row + at]
        return picked

    @cute.jit
    def load(
        self,
        state: State,
        row: Int32,
        rows: Int32,
        tiles: tuple[Int32, Int32],
        begin: Int32,
        end: Int32,
        picked: Int32,
    ) -> tuple[State, Int32]:
        """See `TileLoads`; `picked` are the sources of block `begin`, returned for block `end`."""
        gathered, other = (D, V) if self.loop.gathered == D else (V, D)
        parts = self.tma.partition(row, tiles)
        for k in cutlass.range(begin, end, unroll=1):
            self.ring.producer_acquire(state)
            full = self.ring.full + state.index
            sources = picked
            # The index of the next block is read now, a block before it is used.
            picked = self.look_up(row, rows, k + 1)
            if (k + 1) * BOX > rows:
                # No TMA in the last stage: the arrival that full expects from it, without bytes.
                if self.warp == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(full)
                plain = row + k * BOX + self.warp * _WARP_ROWS + self.lane
                self._copy(other, state.index, tiles[other], plain, rows - k * BOX)
            else:
                if self.warp == 0:
                    self.tma.issue(parts, k, state.index, full)
            # All four warps copy; rows past the expert's end come as zeros.
            self._copy(gathered, state.index, tiles[gathered], sources, rows - k * BOX)
            cute.arch.cp_async_mbarrier_arrive_noinc(full)
            state.advance()
        return state, picked

    @cute.jit
    def _copy(
        self, which: cutlass.Constexpr, stage: Int32, tile: Int32, source: Int32, valid: Int32
    ) -> None:
        """Copy this warp's rows of one operand to a stage; lane r holds the source of its row r.
        Rows from `valid` on are not the expert's, and become zero."""
        tensor, boxes = self.tensors[which], self.loop.boxes[which]
        width = tensor.shape[0]
        below, chunk = self.lane // _LANES, self.lane % _LANES
        column = tile * self.loop.tile[which]
        first = self.warp * _WARP_ROWS + below
        stage_at = self.bases[which] + stage * (boxes * BOX_BYTES) + first * (2 * BOX)
        for i in cutlass.range_constexpr(_WARP_ROWS // _TOGETHER):
            s = cute.arch.shuffle_sync(source, i * _TOGETHER + below)
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
