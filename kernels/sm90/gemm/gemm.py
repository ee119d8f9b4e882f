"""The grouped GEMM kernel that `rows`, `fc1_act` and `fc2_dgrad_dact` are made of.

Persistent CTAs take tiles from `schedule`; the loading warps fill the stages of `mainloop`, two
warp groups multiply them and hand their accumulators to an epilogue. The grid does not depend on
the numbers of rows, which stay on the device: offsets[e] to offsets[e + 1] are expert e's rows, and
nothing is read or written from offsets[L] on.
"""

from dataclasses import dataclass, replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from phalanx.kernels.sm90.exchange.ready import Ready
from phalanx.kernels.sm90.gemm.epilogues import Act, Linear
from phalanx.kernels.sm90.gemm.mainloop import (
    GROUP_THREADS,
    THREADS,
    TILE_ROWS,
    Loads,
    Mainloop,
    Math,
)
from phalanx.kernels.sm90.gemm.storage import array, struct
from phalanx.kernels.sm90.gemm.tile_scheduler import Schedule, Scheduler

SMEM_BYTES = 227 * 1024
_RESERVED_BYTES = 1024 + 1024
"""Barriers and records, and the alignment of what follows them."""


@dataclass(frozen=True)
class GemmConfig:
    """What is compiled into a kernel."""

    epilogue: Any
    """A `Linear`, `Act` or `ActGrad` of `epilogues`."""
    loop: Mainloop
    dynamic: bool = True
    """Claim tiles from a counter; otherwise deal them out in turn."""
    waits: bool = False
    """Wait for rows of A that are still coming; only if they are gathered."""

    def __post_init__(self) -> None:
        if self.waits and not self.loop.gather:
            raise ValueError("ready: rows that are still coming must be gathered by an index")

    @property
    def mainloop(self) -> Mainloop:
        """With as many stages as fit beside the epilogue."""
        left = SMEM_BYTES - _RESERVED_BYTES - self.epilogue.bytes(self.loop)
        return replace(self.loop, stages=min(8, left // self.loop.stage_bytes))

    @property
    def halves(self) -> int:
        """Channels of B that a column of the output takes: 2 with a gate."""
        return self.epilogue.halves if isinstance(self.epilogue, Act) else 1

    @property
    def tells(self) -> bool:
        """Somebody waits for experts, and zeroes the counter."""
        return isinstance(self.epilogue, Linear) and self.epilogue.tells

    @property
    def schedule(self) -> Schedule:
        loading = GROUP_THREADS // 32 if self.loop.gather else 1
        readers = loading + 2 * GROUP_THREADS // 32
        return Schedule(
            self.loop.cluster * TILE_ROWS,
            self.loop.cluster,
            readers,
            self.dynamic,
            sliced=self.tells,
        )


class Gemm:
    """Device side; subclasses make the tensors and launch."""

    def __init__(self, config: GemmConfig) -> None:
        self.config = config

    @cute.jit
    def run(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        epilogue: Any,
        index: cute.Tensor,
        offsets: cute.Pointer,
        counter: cute.Pointer,
        ready: cute.Pointer | None,
        columns: Int32,
        L: Int32,
        clusters: Int32,
        stream: cuda.CUstream,
        giving: tuple[Int32, Int32, Int32] | None = None,
    ) -> None:
        """Launch over A [rows, K] and B [N, K, L], of whose N each `columns` are a half.

        `giving`: so many clusters, of a kernel that tells, end when they have a tile of so high a
        slice of an expert, or a higher one; and the bits of slices.
        """
        loop = self.config.mainloop
        wide = loop.columns // self.config.halves
        apart = columns if self.config.halves == 2 else Int32(loop.columns // 2)
        self.kernel(
            loop.tma(mA, mB),
            epilogue,
            loop.tiled_mma(),
            mA,
            index,
            cute.make_tensor(offsets, cute.make_layout(L + 1)),
            cute.make_tensor(counter, cute.make_layout(1)),
            ready if cutlass.const_expr(self.config.waits) else None,
            L,
            (columns + (wide - 1)) // wide,
            mA.shape[1] // 64,
            apart,
            clusters,
            giving,
        ).launch(
            grid=[clusters * loop.cluster, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[loop.cluster, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        loads: tuple[Any, Any, Any, Any],
        epilogue: Any,
        tiled_mma: cute.TiledMma,
        mA: cute.Tensor,
        index: cute.Tensor,
        offsets: cute.Tensor,
        counter: cute.Tensor,
        ready: cute.Pointer | None,
        experts: Int32,
        column_tiles: Int32,
        blocks: Int32,
        apart: Int32,
        clusters: Int32,
        giving: tuple[Int32, Int32, Int32] | None,
    ) -> None:
        config = self.config
        loop = config.mainloop
        layout = struct(
            schedule=config.schedule.storage(),
            waves=array(Int32, GROUP_THREADS // 32),
            mainloop=loop.storage(),
            epilogue=config.epilogue.storage(loop),
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP_THREADS)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        storage = cutlass.utils.SmemAllocator().allocate(layout)
        bits = None if giving is None else giving[2]
        scheduler = Scheduler(
            config.schedule, storage.schedule, offsets, counter, experts, column_tiles, bits
        )
        if warp == 0:
            if cutlass.const_expr(not loop.gather):
                cpasync.prefetch_descriptor(loads[0])
            cpasync.prefetch_descriptor(loads[2])
            scheduler.start()
            loop.ring(storage.mainloop).start()
            config.epilogue.start(storage.epilogue)
        cute.arch.mbarrier_init_fence()
        self._meet()

        fewer, more = loop.registers
        if group == 0:
            cute.arch.setmaxregister_decrease(fewer)
            if cutlass.const_expr(loop.gather):
                load = Loads(loop, storage.mainloop, rank, loads, mA, index)
                coming = None
                if cutlass.const_expr(config.waits):
                    coming = Ready(ready, storage.waves.data_ptr() + warp)
                self._load(load, scheduler, coming, rank, warp, blocks, apart, clusters, giving)
            else:
                if warp == 0:
                    load = Loads(loop, storage.mainloop, rank, loads, mA, index)
                    self._load(load, scheduler, None, rank, warp, blocks, apart, clusters, giving)
        else:
            cute.arch.setmaxregister_increase(more)
            thread = cute.arch.thread_idx()[0] - GROUP_THREADS
            math = Math(loop, storage.mainloop, tiled_mma, group - 1)
            store = config.epilogue.device(loop, storage.epilogue, thread, epilogue)
            self._compute(math, store, scheduler, rank, group - 1, blocks)
        self._meet()

    @cute.jit
    def _load(
        self,
        load: Loads,
        scheduler: Scheduler,
        coming: Any,
        rank: Int32,
        warp: Int32,
        blocks: Int32,
        apart: Int32,
        clusters: Int32,
        giving: tuple[Int32, Int32, Int32] | None,
    ) -> None:
        """The loading warps: tiles to stages; in the leader also the tile after the current one.

        The claim is made when a tile begins and read half-way, when its answer has long been there
        and the stages hold enough work to hide what a look-up may cost.
        """
        wide = self.config.mainloop.columns // self.config.halves
        leads = (rank == 0) & (warp == 0)
        tile, first, before = Int32(0), Int32(0), Int32(0)
        begin, end, upto = Int32(0), Int32(0), Int32(0)
        if leads:
            tile = scheduler.first()
            begin, end, upto = scheduler.window(first)
            first, before, begin, end, upto, row, stop, column, expert, tiles = scheduler.locate(
                tile, first, before, begin, end, upto
            )
            scheduler.send(Int32(0), row, stop, column, expert)
            if cutlass.const_expr(not self.config.tells):
                if expert < 0:
                    scheduler.finish(tile, clusters, tiles)
        number = Int32(0)
        state, sources_of = load.ring.producer(), load.sources
        if cutlass.const_expr(self.config.waits):
            coming.start()
        row, stop, column, expert = scheduler.read(number)
        while expert >= 0:
            claimed, goes_on = Int32(0), leads
            if cutlass.const_expr(self.config.tells):
                assert giving is not None
                late = (cute.arch.cluster_idx()[0] < giving[0]) & (expert >= giving[1])
                goes_on = leads & ~late
                if leads & late:
                    scheduler.send(number + 1, Int32(0), Int32(0), Int32(0), Int32(-1))
            if goes_on:
                claimed = scheduler.claim()
            if cutlass.const_expr(self.config.waits):
                coming(expert)
            own = row + rank * TILE_ROWS
            half = (blocks + 1) // 2
            sources = sources_of(own, stop)
            at = column * wide
            if cutlass.const_expr(self.config.tells):
                expert = expert >> scheduler.bits  # named with its slice
            state = load(state, sources, own, at, expert, apart, Int32(0), half)
            if goes_on:
                tile = scheduler.after(tile, claimed, clusters)
                first, before, begin, end, upto, row, stop, next_column, next_expert, tiles = (
                    scheduler.locate(tile, first, before, begin, end, upto)
                )
                scheduler.send(number + 1, row, stop, next_column, next_expert)
                if cutlass.const_expr(not self.config.tells):
                    if next_expert < 0:
                        scheduler.finish(tile, clusters, tiles)
            state = load(state, sources, own, at, expert, apart, half, blocks)
            number += 1
            row, stop, column, expert = scheduler.read(number)

    @cute.jit
    def _compute(
        self, math: Math, store: Any, scheduler: Scheduler, rank: Int32, group: Int32, blocks: Int32
    ) -> None:
        """A multiplying warp group: stages to accumulators to what the epilogue makes of them."""
        loop = self.config.mainloop
        number, turn, before = Int32(0), Int32(0), store.before
        start = math.start
        start()
        row, end, column, expert = scheduler.read(number)
        while expert >= 0:
            mine = True
            if cutlass.const_expr(loop.pingpong):  # tiles are taken in turn
                mine = number & 1 == group
            if mine:
                own = row + rank * TILE_ROWS
                before(own, end, column)
                math(number * blocks, blocks, end - own)
                turn = store(math.acc, turn, own, end, column, expert)
            number += 1
            row, end, column, expert = scheduler.read(number)
        store.finish(turn)

    @cute.jit
    def _meet(self) -> None:
        """A barrier of all threads of the cluster."""
        if cutlass.const_expr(self.config.loop.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()


def matrix(pointer: cute.Pointer, rows: Int32, columns: Int32) -> cute.Tensor:
    """[rows, columns], contiguous; columns a multiple of 64."""
    columns = cute.assume(columns, divby=64)
    pitch = cute.assume(Int64(columns), divby=64)
    return cute.make_tensor(pointer, cute.make_layout((rows, columns), stride=(pitch, 1)))


def weights(pointer: cute.Pointer, N: Int32, K: Int32, L: Int32, transposed: bool) -> cute.Tensor:
    """[N, K, L] over storage [L, N, K], or [L, K, N] if transposed; N and K multiples of 64."""
    N, K = cute.assume(N, divby=64), cute.assume(K, divby=64)
    wide_n, wide_k = cute.assume(Int64(N), divby=64), cute.assume(Int64(K), divby=64)
    plane = cute.assume(Int64(N) * Int64(K), divby=64)
    stride = (1, wide_n, plane) if transposed else (wide_k, 1, plane)
    return cute.make_tensor(pointer, cute.make_layout((N, K, L), stride=stride))


def words(pointer: cute.Pointer, L: Int32, N: Int32) -> cute.Tensor:
    """[L, N] of bf16 as words of two."""
    return cute.make_tensor(pointer, cute.make_layout((L, N // 2), stride=(N // 2, 1)))


def vector(pointer: cute.Pointer, size: Int32) -> cute.Tensor:
    return cute.make_tensor(pointer, cute.make_layout(size))
