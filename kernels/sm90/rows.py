"""Kernel `rows`: y[s] = a[s] @ w[e]^T (+ bias[e] * scale[s]) for the rows s of every expert e.

fc2 forward and the data gradient of fc1. One warp loads, two warp groups multiply and store; the
three meet in the stages of `mainloop` and the records of `schedule`. The grid does not depend on
the numbers of rows, which stay on the device: offsets[e] to offsets[e + 1] are expert e's rows, and
nothing is written from offsets[L] on.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from kernels.sm90.epilogue import Epilogue, Store
from kernels.sm90.mainloop import (
    GROUP_THREADS,
    LOAD_REGISTERS,
    MATH_REGISTERS,
    MATH_WARPS,
    THREADS,
    Loads,
    Mainloop,
    Math,
)
from kernels.sm90.schedule import Schedule, Scheduler
from kernels.sm90.storage import struct

SMEM_BYTES = 227 * 1024
_RESERVED_BYTES = 1024 + 1024
"""Barriers and records, and the alignment of what follows them."""


@dataclass(frozen=True)
class RowsConfig:
    """What is compiled into a `rows` kernel."""

    columns: int = 256
    """Columns of a CTA's tile: 128, 192 or 256. Its rows are 128."""
    cluster: int = 2
    """CTAs, 1 or 2, that are below each other and share the loads of w."""
    w_transposed: bool = False
    """w is stored [L, K, N]."""
    bias: bool = False
    dynamic: bool = True
    """Claim tiles from a counter; otherwise deal them out in turn."""

    def __post_init__(self) -> None:
        if self.columns not in (128, 192, 256) or self.cluster not in (1, 2):
            raise ValueError(
                f"columns={self.columns}, cluster={self.cluster}: tiles have 128, 192 or 256 "
                "columns and clusters 1 or 2 CTAs"
            )

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.columns, self.bias)

    @property
    def mainloop(self) -> Mainloop:
        """As many stages as fit beside the epilogue's buffers."""
        one = Mainloop(self.columns, 1, self.cluster, self.w_transposed)
        left = SMEM_BYTES - _RESERVED_BYTES - self.epilogue.bytes
        return Mainloop(self.columns, left // one.stage_bytes, self.cluster, self.w_transposed)

    @property
    def schedule(self) -> Schedule:
        rows = self.cluster * self.mainloop.rows
        return Schedule(rows, self.cluster, 1 + MATH_WARPS, self.dynamic)


class RowsKernel:
    """The kernel of a configuration, as `cute.compile` takes it."""

    def __init__(self, config: RowsConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        w: cute.Pointer,
        y: cute.Pointer,
        bias: cute.Pointer,
        scale: cute.Pointer,
        offsets: cute.Pointer,
        counter: cute.Pointer,
        sizes: tuple[Int32, Int32, Int32, Int32],
        clusters: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch on `clusters` clusters.

        Args:
            a, w, y: bf16 [S, K], [L, N, K] or [L, K, N], and [S, N], each contiguous.
            bias: bf16 [L, N] as words of two; scale: fp32 [S]. Read only with config.bias.
            offsets: int32 [L + 1]. counter: int32 [1], 0 before and after.
            sizes: S, N, K, L; N and K are multiples of 64.
        """
        S, N, K, L = sizes
        N, K = cute.assume(N, divby=64), cute.assume(K, divby=64)
        wide_n, wide_k = cute.assume(Int64(N), divby=64), cute.assume(Int64(K), divby=64)
        plane = cute.assume(Int64(N) * Int64(K), divby=64)
        mA = cute.make_tensor(a, cute.make_layout((S, K), stride=(wide_k, 1)))
        mY = cute.make_tensor(y, cute.make_layout((S, N), stride=(wide_n, 1)))
        if cutlass.const_expr(self.config.w_transposed):
            mB = cute.make_tensor(w, cute.make_layout((N, K, L), stride=(1, wide_n, plane)))
        else:
            mB = cute.make_tensor(w, cute.make_layout((N, K, L), stride=(wide_k, 1, plane)))
        words = cute.make_tensor(bias, cute.make_layout((L, N // 2), stride=(N // 2, 1)))
        loop = self.config.mainloop
        self.kernel(
            loop.tma(mA, mB),
            self.config.epilogue.tma(mY),
            loop.tiled_mma(),
            mY,
            words,
            cute.make_tensor(scale, cute.make_layout(S)),
            cute.make_tensor(offsets, cute.make_layout(L + 1)),
            cute.make_tensor(counter, cute.make_layout(1)),
            L,
            (N + (loop.columns - 1)) // loop.columns,
            K // loop.depth,
            clusters,
        ).launch(
            grid=[clusters * self.config.cluster, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[self.config.cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        loads: tuple[Any, Any, Any, Any],
        stores: tuple[Any, Any],
        tiled_mma: cute.TiledMma,
        mY: cute.Tensor,
        bias: cute.Tensor,
        scale: cute.Tensor,
        offsets: cute.Tensor,
        counter: cute.Tensor,
        experts: Int32,
        column_tiles: Int32,
        blocks: Int32,
        clusters: Int32,
    ) -> None:
        config = self.config
        loop = config.mainloop

        layout = struct(
            schedule=config.schedule.storage(),
            mainloop=loop.storage(),
            epilogue=config.epilogue.storage(),
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP_THREADS)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        storage = cutlass.utils.SmemAllocator().allocate(layout)
        scheduler = Scheduler(
            config.schedule, storage.schedule, offsets, counter, experts, column_tiles
        )
        if warp == 0:
            cpasync.prefetch_descriptor(loads[0])
            cpasync.prefetch_descriptor(loads[2])
            cpasync.prefetch_descriptor(stores[0])
            scheduler.start()
        ring = loop.pipeline(storage.mainloop)
        cute.arch.mbarrier_init_fence()
        self._meet()

        if group == 0:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == 0:
                load = Loads(loop, ring, storage.mainloop, rank, loads)
                self._load(load, scheduler, rank, blocks, clusters)
        else:
            cute.arch.setmaxregister_increase(MATH_REGISTERS)
            thread = cute.arch.thread_idx()[0] - GROUP_THREADS
            math = Math(loop, ring, storage.mainloop, tiled_mma, group - 1)
            store = Store(
                config.epilogue, storage.epilogue, tiled_mma, thread, stores, mY, bias, scale
            )
            self._compute(math, store, scheduler, rank, blocks)
        self._meet()

    @cute.jit
    def _load(
        self, load: Loads, scheduler: Scheduler, rank: Int32, blocks: Int32, clusters: Int32
    ) -> None:
        """The loading warp: tiles to stages; in the leader also the tile after the current one.

        The claim is made when a tile begins and read half-way, when its answer has long been there
        and the stages hold enough work to hide what a look-up may cost.
        """
        config = self.config
        leads = rank == 0
        tile, first, before = cute.arch.cluster_idx()[0], Int32(0), Int32(0)
        begin, end, upto = Int32(0), Int32(0), Int32(0)
        if leads:
            begin, end, upto = scheduler.window(first)
            first, before, begin, end, upto, row, stop, column, expert, tiles = scheduler.locate(
                tile, first, before, begin, end, upto
            )
            scheduler.send(Int32(0), row, stop, column, expert)
        number = Int32(0)
        state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, config.mainloop.stages
        )
        row, stop, column, expert = scheduler.read(number)
        while expert >= 0:
            claimed = Int32(0)
            if leads:
                claimed = scheduler.claim()
            own = row + rank * config.mainloop.rows
            half = (blocks + 1) // 2
            state = load(state, own, column, expert, Int32(0), half)
            if leads:
                tile = scheduler.next_tile(tile, claimed, clusters)
                first, before, begin, end, upto, row, stop, next_column, next_expert, tiles = (
                    scheduler.locate(tile, first, before, begin, end, upto)
                )
                scheduler.send(number + 1, row, stop, next_column, next_expert)
                if next_expert < 0:
                    scheduler.finish(tile, clusters, tiles)
            state = load(state, own, column, expert, half, blocks)
            number += 1
            row, stop, column, expert = scheduler.read(number)

    @cute.jit
    def _compute(
        self, math: Math, store: Store, scheduler: Scheduler, rank: Int32, blocks: Int32
    ) -> None:
        """A multiplying warp group: stages to accumulators to rows of y."""
        stages = self.config.mainloop.stages
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
        free = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
        number = Int32(0)
        row, end, column, expert = scheduler.read(number)
        while expert >= 0:
            read, free = math(read, free, blocks)
            store(math.acc, row + rank * self.config.mainloop.rows, end, column, expert)
            number += 1
            row, end, column, expert = scheduler.read(number)
        store.finish()

    @cute.jit
    def _meet(self) -> None:
        """A barrier of all threads of the cluster."""
        if cutlass.const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
