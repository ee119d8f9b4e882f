"""Kernel `wgrad`: dw[e] (+)= sum over the rows s of expert e of d[s]^T v[s], the weight gradients.

A tile of dw belongs to one expert and is computed over all of its rows by one CTA. Every expert has
the same number of tiles, so tiles are numbered expert by expert and looked up by division. Experts
without rows get zeros, or nothing where the kernel adds or nobody reads them. The numbers of rows
stay on the device: offsets[e] to offsets[e + 1] are expert e's, and rows from offsets[L] on have no
influence.

Roles. A CTA has 12 warps in three groups, one CTA an SM:

    warp       registers  role
    0          40         scheduler (claim, look-up, record) and TMA of d and v
    1          40         clears the rows after an expert's last one in its last stage
    2, 3       40         nothing to do
    0 - 3      56         with an index instead of these: cp.async of the gathered operand; warp 0
    is
                          the scheduler and issues TMA of the other one
    4 - 11     232 / 224  two groups, 64 rows of the tile each: wgmma, then store or add the tile

Pipelines, and the arrivals that complete a phase of their barriers:

    schedule   2 records       full: 1, of warp 0       empty: 10 or 12: loading warps (2 or 4) and
    8 stages     4 or 5          full: 1 (+ 128)          empty: 8, of the warps that multiply
                               tma_done: 1              leader_started: 1   (`ContractionRing`)
    blocks     2 to 4 buffers a group of the output: window_expert barriers 1 and 2, 128 threads
    each

    warp 0 --TMA--> tma_done[stage] --warp 1 clears--> full[stage]     last stage of an expert
    warp 0 --TMA-----------------------------------> full[stage] --> group 1, 2 stages later group 2

The second group runs 2 stages behind the first: one stores a tile while the other multiplies.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from phalanx.kernels.sm90.experts.accumulate import Output, Store
from phalanx.kernels.sm90.experts.contraction import (
    BOX,
    MMA_WARPS,
    Contraction,
    ContractionMma,
    ContractionRing,
    D,
    V,
    blocks_of,
)
from phalanx.kernels.sm90.experts.contraction_loads import Clear, Gather, TileLoads, make_tma
from phalanx.kernels.sm90.gemm.expert_tiles import ExpertTiles, unpack
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, THREADS
from phalanx.kernels.sm90.gemm.storage import struct
from phalanx.kernels.sm90.gemm.tile_scheduler import Schedule, Scheduler
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, IntPtr

SMEM_BYTES = 227 * 1024
_RESERVED_BYTES = 1024 + 1024
"""Barriers and records, and the alignment of what follows them."""


@dataclass(frozen=True)
class WgradConfig:
    """Choices that are compiled into a `wgrad` kernel."""

    columns: int = 256
    """Columns of a tile, of I: 128, 192 or 256. Its rows, of O, are 128."""
    fp32_out: bool = False
    """dw is fp32, not bf16."""
    add: bool = False
    """Add to dw; a bf16 sum is rounded a second time."""
    gathered: int | None = None
    """Operand whose rows are picked by an index: D, V or None."""
    ordered: bool = False
    """Take the experts in an order given by the caller."""
    zeros: bool = True
    """Write zeros for experts without rows, unless it adds."""

    def __post_init__(self) -> None:
        if self.columns not in (128, 192, 256):
            raise ValueError(f"columns={self.columns}: tiles have 128, 192 or 256 columns")
        if self.gathered not in (None, D, V):
            raise ValueError(f"gathered={self.gathered}: operand {D} (d), {V} (v) or None")

    @property
    def output(self) -> Output:
        """Buffers of the output: narrower tiles leave memory to stage all or most of a tile."""
        blocks = self.columns // (32 if self.fp32_out else 64)
        return Output(
            self.columns, self.fp32_out, self.add, 2 if self.columns == 256 else min(4, blocks)
        )

    @property
    def contraction(self) -> Contraction:
        """The product with as many stages as fit beside the output's buffers."""
        one = Contraction(self.columns, 1)
        left = SMEM_BYTES - _RESERVED_BYTES - self.output.bytes
        return Contraction(self.columns, left // one.stage_bytes, self.gathered)

    @property
    def loading_warps(self) -> int:
        """One for TMA and one to clear; or four that gather."""
        return 2 if self.gathered is None else 4

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.contraction.rows, self.loading_warps + MMA_WARPS)


class WgradKernel:
    """The kernel of a configuration, as `cute.compile` takes it."""

    warpgroups: ClassVar[bool] = True

    def __init__(self, config: WgradConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        d: Bf16Ptr,
        v: Bf16Ptr,
        dw: Bf16Ptr,
        index: IntPtr,
        offsets: IntPtr,
        order: IntPtr,
        counter: IntPtr,
        S: Int32,
        O: Int32,  # noqa: E741
        I: Int32,  # noqa: E741
        L: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch.

        Args:
            d, v: bf16 [S, O] and [S, I], or [any, ...] for the one with an index; contiguous.
            dw: [L, O, I]. index: int32 [S]; read only with config.gathered.
            offsets: int32 [L + 1]. order: int32 [L]; read only with config.ordered.
            counter: int32 [1], 0 before and after.
            O, I: multiples of 64. ctas: size of the grid.
        """
        config = self.config
        loop = config.contraction
        O, I = cute.assume(O, divby=BOX), cute.assume(I, divby=BOX)  # noqa: E741
        wide_o, wide_i = cute.assume(Int64(O), divby=BOX), cute.assume(Int64(I), divby=BOX)
        plane = cute.assume(Int64(O) * Int64(I), divby=BOX)
        mD = cute.make_tensor(d, cute.make_layout((O, S), stride=(1, wide_o)))
        mV = cute.make_tensor(v, cute.make_layout((I, S), stride=(1, wide_i)))
        if cutlass.const_expr(config.fp32_out):
            dw = cute.recast_ptr(dw, dtype=Float32)
        mW = cute.make_tensor(dw, cute.make_layout((O, I, L), stride=(wide_i, 1, plane)))
        self.kernel(
            make_tma(loop, mD, mV),
            config.output.tma(mW),
            loop.tiled_mma(),
            mD,
            mV,
            cute.make_tensor(index, cute.make_layout(S)),
            cute.make_tensor(offsets, cute.make_layout(L + 1)),
            cute.make_tensor(order, cute.make_layout(L)),
            cute.make_tensor(counter, cute.make_layout(1)),
            L,
            ctas,
        ).launch(
            grid=[ctas, 1, 1],
            block=[THREADS, 1, 1],
            cluster=[1, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        loads: tuple[Any, ...],
        stores: tuple[Any, Any],
        tiled_mma: cute.TiledMma,
        mD: cute.Tensor,
        mV: cute.Tensor,
        index: cute.Tensor,
        offsets: cute.Tensor,
        order: cute.Tensor,
        counter: cute.Tensor,
        experts: Int32,
        ctas: Int32,
    ) -> None:
        config = self.config
        loop = config.contraction
        layout = struct(
            schedule=config.schedule.storage(),
            contraction=loop.storage(),
            output=config.output.storage(),
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP_THREADS)
        storage = cutlass.utils.SmemAllocator().allocate(layout)
        shape = (mD.shape[0], mV.shape[0])
        tiles = ExpertTiles(
            offsets,
            order,
            config.ordered,
            config.schedule.band,
            experts,
            (shape[0] + (loop.rows - 1)) // loop.rows,
            (shape[1] + (loop.columns - 1)) // loop.columns,
        )
        scheduler = Scheduler(
            config.schedule, storage.schedule, offsets, counter, experts, tiles.column_tiles
        )
        ring = ContractionRing(loop, storage.contraction)
        if warp == 0:
            for atom in loads[::2]:
                cpasync.prefetch_descriptor(atom)
            cpasync.prefetch_descriptor(stores[0])
            scheduler.init_barriers()
            ring.init_barriers()
        # Barriers must be visible to all threads, and to TMA, before anybody waits at one.
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if group == 0:
            cute.arch.setmaxregister_decrease(loop.registers[0])
            load = TileLoads(loop, ring, storage.contraction, loads)
            if cutlass.const_expr(config.gathered is None):
                if warp == 0:
                    self._load(load, scheduler, tiles, warp, ctas)
                if warp == 1:
                    self._clear(Clear(loop, ring, storage.contraction), scheduler)
            else:
                gather = Gather(loop, ring, storage.contraction, warp, load, (mD, mV), index)
                self._load(gather, scheduler, tiles, warp, ctas)
        else:
            cute.arch.setmaxregister_increase(loop.registers[1])
            thread = cute.arch.thread_idx()[0] - GROUP_THREADS
            mma = ContractionMma(loop, ring, storage.contraction, tiled_mma, thread)
            store = Store(config.output, storage.output, tiled_mma, thread, stores, shape)
            self._compute(mma, store, scheduler)
        cute.arch.sync_threads()

    @cute.jit
    def _load(
        self,
        load: TileLoads | Gather,
        scheduler: Scheduler,
        tiles: ExpertTiles,
        warp: Int32,
        ctas: Int32,
    ) -> None:
        """Loading warp: tiles to stages; the first one also finds the tile after the current one.

        The claim is issued when a tile begins and read half-way: by then the atomic has returned,
        and the stages hold enough work to hide a look-up.
        """
        look_up = load.look_up
        leads = warp == 0
        tile, first = Int32(0), Int32(0)
        window_expert, begin, end = Int32(0), Int32(0), Int32(0)
        if leads:
            tile = scheduler.first()
            window_expert, begin, end = tiles.window(first)
            first, window_expert, begin, end, row, stop, position, expert = tiles.locate(
                tile, first, window_expert, begin, end
            )
            scheduler.send(Int32(0), row, stop, position, expert)
            if expert < 0:
                scheduler.finish(tile, ctas, tiles.each * tiles.experts)
        number = Int32(0)
        state = self.config.contraction.state(pipeline.PipelineUserType.Producer)
        row, stop, position, expert = scheduler.read(number)
        while expert >= 0:
            claimed = Int32(0)
            if leads:
                claimed = scheduler.claim()
            rows, at = stop - row, unpack(position)
            blocks = blocks_of(rows)
            half = (blocks + 1) // 2
            picked = look_up(row, rows, Int32(0))
            state, picked = load(state, row, rows, at, Int32(0), half, picked)
            if leads:
                tile = scheduler.claimed_tile(claimed)
                (
                    first,
                    window_expert,
                    begin,
                    end,
                    next_row,
                    next_stop,
                    next_position,
                    next_expert,
                ) = tiles.locate(tile, first, window_expert, begin, end)
                scheduler.send(number + 1, next_row, next_stop, next_position, next_expert)
                if next_expert < 0:
                    scheduler.finish(tile, ctas, tiles.each * tiles.experts)
            state, picked = load(state, row, rows, at, half, blocks, picked)
            number += 1
            row, stop, position, expert = scheduler.read(number)

    @cute.jit
    def _clear(self, clear: Clear, scheduler: Scheduler) -> None:
        """Clearing warp: it handles the last stage of tiles whose rows do not fill it."""
        number, filled, phases = Int32(0), Int32(0), Int32(0)
        row, stop, _, expert = scheduler.read(number)
        while expert >= 0:
            filled += blocks_of(stop - row)
            left = (stop - row) % BOX
            if left != 0:
                phases = clear(filled - 1, left, phases)
            number += 1
            row, stop, _, expert = scheduler.read(number)

    @cute.jit
    def _compute(self, mma: ContractionMma, store: Store, scheduler: Scheduler) -> None:
        """Multiplying warp group: stages to accumulators to a tile of dw."""
        read = self.config.contraction.state(pipeline.PipelineUserType.Consumer)
        free = self.config.contraction.state(pipeline.PipelineUserType.Consumer)
        zeros = store.zeros
        number = Int32(0)
        row, stop, position, expert = scheduler.read(number)
        while expert >= 0:
            down, across = unpack(position)
            tile_expert, rows = expert, stop - row
            if rows > 0:
                read, free = mma(read, free, blocks_of(rows))
            number += 1
            row, stop, position, expert = scheduler.read(number)
            if rows > 0:
                store(mma.acc, down, across, tile_expert)
            else:
                if cutlass.const_expr(self.config.zeros and not self.config.add):
                    zeros(down, across, tile_expert)
        store.finish()
