"""The multiplication: TMA loads by one warp, wgmma by two warp groups, through a ring of stages.

For a tile of the rows of one expert, acc[m, n] = sum over k of A[row + m, k] * B[expert][n, k] in
fp32. A is [rows, K] with K contiguous; B is [N, K] per expert with K contiguous, or N contiguous
(the weights read transposed); the expert is a coordinate of B's TMA descriptor. In a cluster each
CTA has its own rows and loads its share of B for both. Rows and columns past the end of a tensor
are read as 0, rows past the end of the expert are whatever follows: epilogues drop both.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from kernels.sm90.storage import array, struct

GROUP_THREADS = 128
MATH_GROUPS = 2
MATH_WARPS = 4 * MATH_GROUPS
THREADS = GROUP_THREADS * (1 + MATH_GROUPS)
LOAD_REGISTERS, MATH_REGISTERS = 40, 232
"""A thread of the loading and of a multiplying warp group; 128 * 40 + 256 * 232 fit an SM."""


@dataclass(frozen=True)
class Mainloop:
    """Tile sizes and what follows from them. Used while tracing, on host and device side."""

    columns: int
    stages: int
    cluster: int
    b_transposed: bool
    """B is stored [K, N] per expert."""
    rows: int = 128
    depth: int = 64

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.rows, self.columns, self.depth

    @property
    def stage_bytes(self) -> int:
        return 2 * self.depth * (self.rows + self.columns)

    def tiled_mma(self) -> cute.TiledMma:
        """Two warp groups, each 64 rows and all columns."""
        major = OperandMajorMode.MN if self.b_transposed else OperandMajorMode.K
        return hopper.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            major,
            Float32,
            (MATH_GROUPS, 1, 1),
            tiler_mn=(64, self.columns),
        )

    def smem_layouts(self) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
        """Stages of A and B in shared memory, swizzled by 128 bytes."""
        layout = LayoutEnum.COL_MAJOR if self.b_transposed else LayoutEnum.ROW_MAJOR
        a = hopper.make_smem_layout_a(LayoutEnum.ROW_MAJOR, self.tile, BFloat16, self.stages)
        b = hopper.make_smem_layout_b(layout, self.tile, BFloat16, self.stages)
        return a, b

    def tma(self, mA: cute.Tensor, mB: cute.Tensor) -> tuple[Any, Any, Any, Any]:
        """Host side: atom and tensor of A [rows, K], then of B [N, K, experts]."""
        layout_a, layout_b = self.smem_layouts()
        one = cpasync.CopyBulkTensorTileG2SOp()
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else one
        m, n, k = self.tile
        a = cpasync.make_tiled_tma_atom(one, mA, cute.slice_(layout_a, (None, None, 0)), (m, k))
        b = cpasync.make_tiled_tma_atom(
            op, mB, cute.slice_(layout_b, (None, None, 0)), (n, k), num_multicast=self.cluster
        )
        return a[0], a[1], b[0], b[1]

    def storage(self) -> Any:
        """The part of a kernel's shared memory that the stages need."""
        layout_a, layout_b = self.smem_layouts()
        return struct(
            barriers=array(cutlass.Int64, 2 * self.stages),
            a=array(BFloat16, cute.cosize(layout_a), 1024),
            b=array(BFloat16, cute.cosize(layout_b), 1024),
        )

    def pipeline(self, storage: Any) -> pipeline.PipelineTmaAsync:
        """The ring of stages; a stage is free when the multiplying warps of the cluster say so."""
        threads = pipeline.Agent.Thread
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(),
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(threads),
            consumer_group=pipeline.CooperativeGroup(threads, self.cluster * MATH_WARPS),
            tx_count=self.stage_bytes,
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
            defer_sync=True,
        )


class Loads:
    """The loading warp's side."""

    def __init__(
        self, loop: Mainloop, ring: pipeline.PipelineTmaAsync, storage: Any, rank: Int32, tma: Any
    ) -> None:
        """`tma` is what `Mainloop.tma` returned; `rank` is the CTA's in its cluster."""
        self.loop, self.ring, self.rank = loop, ring, rank
        self.atom_a, self.tensor_a, self.atom_b, tensor_b = tma
        layout_a, layout_b = loop.smem_layouts()
        self.a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        tiles_b = cute.local_tile(tensor_b, (loop.columns, loop.depth), (None, None, None))
        self.to_b, self.from_b = cpasync.tma_partition(
            self.atom_b,
            rank,
            cute.make_layout(loop.cluster),
            cute.group_modes(b, 0, 2),
            cute.group_modes(tiles_b, 0, 2),
        )

    def rows(self, row: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Destination and source of A's tiles for the rows from `row` on: (box, stage | k)."""
        shifted = cute.domain_offset((row, 0), self.tensor_a)
        tiles = cute.local_tile(shifted, (self.loop.rows, self.loop.depth), (0, None))
        return cpasync.tma_partition(
            self.atom_a,
            0,
            cute.make_layout(1),
            cute.group_modes(self.a, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )

    @cute.jit
    def __call__(
        self,
        state: pipeline.PipelineState,
        row: Int32,
        column: Int32,
        expert: Int32,
        begin: Int32,
        end: Int32,
    ) -> pipeline.PipelineState:
        """Load blocks begin .. end - 1 of the contraction for this CTA's tile."""
        to_a, from_a = self.rows(row)
        from_b = self.from_b[(None, column, None, expert)]
        for k in cutlass.range(begin, end, unroll=1):
            self.ring.producer_acquire(state)
            barrier = self.ring.producer_get_barrier(state)
            cute.copy(
                self.atom_a, from_a[(None, k)], to_a[(None, state.index)], tma_bar_ptr=barrier
            )
            if cutlass.const_expr(self.loop.cluster > 1):
                cute.copy(
                    self.atom_b,
                    from_b[(None, k)],
                    self.to_b[(None, state.index)],
                    tma_bar_ptr=barrier,
                    mcast_mask=cutlass.Int16((1 << self.loop.cluster) - 1),
                )
            else:
                cute.copy(
                    self.atom_b,
                    from_b[(None, k)],
                    self.to_b[(None, state.index)],
                    tma_bar_ptr=barrier,
                )
            state.advance()
        return state


class Math:
    """A multiplying warp group's side. `acc` holds the tile after a call."""

    def __init__(
        self,
        loop: Mainloop,
        ring: pipeline.PipelineTmaAsync,
        storage: Any,
        tiled_mma: cute.TiledMma,
        group: Int32,
    ) -> None:
        """`group` is 0 or 1: which 64 rows of the tile."""
        self.loop, self.ring, self.tiled_mma = loop, ring, tiled_mma
        layout_a, layout_b = loop.smem_layouts()
        a = storage.a.get_tensor(layout_a.outer, swizzle=layout_a.inner)
        b = storage.b.get_tensor(layout_b.outer, swizzle=layout_b.inner)
        mma = tiled_mma.get_slice(group * GROUP_THREADS)
        self.a = tiled_mma.make_fragment_A(mma.partition_A(a))
        self.b = tiled_mma.make_fragment_B(mma.partition_B(b))
        shape = tiled_mma.partition_shape_C((loop.rows, loop.columns))
        self.acc = cute.make_rmem_tensor(shape, Float32)

    @cute.jit
    def __call__(
        self, read: pipeline.PipelineState, free: pipeline.PipelineState, blocks: Int32
    ) -> tuple[pipeline.PipelineState, pipeline.PipelineState]:
        """Multiply `blocks` >= 1 stages into a fresh accumulator; `free` lags behind `read`."""
        warpgroup.fence()
        self._block(read, True)
        read.advance()
        for _ in cutlass.range(1, blocks, unroll=1):
            self._block(read, False)
            read.advance()
            warpgroup.wait_group(1)
            self.ring.consumer_release(free)
            free.advance()
        warpgroup.wait_group(0)
        self.ring.consumer_release(free)
        free.advance()
        return read, free

    def _block(self, state: pipeline.PipelineState, fresh: bool) -> None:
        self.ring.consumer_wait(state)
        for k in range(cute.size(self.a, mode=[2])):
            self.tiled_mma.set(warpgroup.Field.ACCUMULATE, not (fresh and k == 0))
            at = (None, None, k, state.index)
            cute.gemm(self.tiled_mma, self.acc, self.a[at], self.b[at], self.acc)
        warpgroup.commit_group()
