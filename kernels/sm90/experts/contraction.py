"""The product of a weight gradient in bf16: its pipeline of stages, and wgmma of two warp groups.

For a tile, acc[o, i] = sum over the rows s of one expert of d[s, o] * v[s, i], in fp32. Both
operands are stored by rows, so wgmma reads both transposed. A stage holds 64 rows: 128 columns of
d and up to 256 of v, in boxes of 64 columns with 128 bytes a row, swizzled. Stages are multiplied
whole: the loading warps make rows after the expert's last one zero in both operands.
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

from phalanx.kernels.sm90.experts.contraction_loads import (
    BOX,
    BOX_BYTES,
    Clear,
    ContractionRing,
    D,
    Gather,
    TileLoads,
    V,
    blocks_of,
)
from phalanx.kernels.sm90.experts.wgrad_operands import Factor
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, MMA_GROUPS, TILE_ROWS
from phalanx.kernels.sm90.gemm.ring import State
from phalanx.kernels.sm90.gemm.tensors import array, struct, vector

SKEW = 2  # stages by which the first group leads: one group stores while the other one multiplies


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

    def loader(self, *args: Any) -> Any:
        return (TileLoads if self.gathered is None else Gather)(self, *args)

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
        other = copy(self)
        other.tiled_mma = tiled_mma
        return other

    def begin(self) -> tuple[State, State]:
        user = pipeline.PipelineUserType.Consumer
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
        if self.group == 1:
            index = state.index + cutlass.min(blocks, SKEW) - 1
            phase = state.phase
            if index >= self.loop.stages:
                index -= self.loop.stages
                phase ^= 1
            cute.arch.mbarrier_wait(self.ring.leader_started + index, phase)
