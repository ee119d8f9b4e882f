"""Kernel `wgrad` in FP8: dw[e] (+)= sum over the tokens t of expert e of d[:, t] v[:, t]^T.

Both operands are stored by channels, an expert's tokens side by side and padded with zeros to
whole blocks of 128 (`QuantizedColumns`), so that the contraction is contiguous, all stages are
whole, and no stage holds tokens of two experts. The scales are those of `wgrad_mma`.

Roles. A CTA has 12 warps in three groups, one CTA an SM:

    warp       registers  role
    0          40         scheduler (claim, look-up, record) and TMA of both operands
    1 - 3      40         nothing to do
    4 - 11     232        two groups, 64 rows of the tile each: multiply and promote block by block
                          (`promotion`), then store the tile or add it (`accumulate.Store`)

Pipelines, and the arrivals that complete a phase of their barriers:

    schedule   2 records     full: 1, of warp 0             empty: 9: warp 0, and 8 that multiply
    ring       4 or 5 stages full: 1, of warp 0, and bytes  empty: 8, of the warps that multiply
    blocks     2 to 4 buffers a group of the output: named barriers 1 and 2, 128 threads each

Tiles and their order are those of `experts.wgrad_kernel`, the stages those of `fp8.mainloop`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from phalanx.kernels.sm90.experts.accumulate import Output, Store
from phalanx.kernels.sm90.fp8.mainloop import BLOCK, Fp8Mainloop, activations, weights
from phalanx.kernels.sm90.fp8.wgrad_mma import Fp8WgradMma, VectorWgradMma, layout_mma
from phalanx.kernels.sm90.gemm.expert_tiles import ExpertTiles, unpack
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, THREADS, TILE_ROWS
from phalanx.kernels.sm90.gemm.storage import struct
from phalanx.kernels.sm90.gemm.tile_scheduler import Schedule, Scheduler
from phalanx.kernels.sm90.jit import ptx
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, Fp8Ptr, Fp32Ptr, IntPtr

SMEM_BYTES = 227 * 1024
_RESERVED_BYTES = 1024 + 1024
"""Barriers and records, and the alignment of what follows them."""


@dataclass(frozen=True)
class Fp8WgradConfig:
    """Choices that are compiled into a kernel."""

    columns: int = 256
    """Columns of a tile, of I: 128, 192 or 256. Its rows, of O, are 128."""
    fp32_out: bool = False
    """dw is fp32, not bf16."""
    add: bool = False
    """Add to dw; a bf16 sum is rounded a second time."""
    ordered: bool = False
    """Take the experts in an order given by the caller."""
    rows_format: str = "e4m3"
    """Format of d."""
    vector: bool = False
    """Scales for each channel of 128 tokens, instead of for 128 channels."""
    zeros: bool = True
    """Write zeros for experts without rows, unless it adds."""

    def __post_init__(self) -> None:
        if self.columns not in (128, 192, 256):
            raise ValueError(f"columns={self.columns}: tiles have 128, 192 or 256 columns")
        if self.vector and self.columns > 128:  # scales of more columns do not fit in registers
            raise ValueError(f"columns={self.columns}: 128 in `vector` blocks")

    @property
    def output(self) -> Output:
        """Buffers of the output: narrower tiles leave memory to stage all or most of a tile."""
        blocks = self.columns // (32 if self.fp32_out else 64)
        buffers = 2 if self.columns == 256 else min(4, blocks)
        return Output(self.columns, self.fp32_out, self.add, buffers)

    @property
    def mainloop(self) -> Fp8Mainloop:
        """The loop with as many stages as fit beside the output's buffers."""
        loop = Fp8Mainloop(self.columns, rows_format=self.rows_format)
        left = SMEM_BYTES - _RESERVED_BYTES - self.output.bytes
        return replace(loop, stages=left // loop.stage_bytes)

    @property
    def schedule(self) -> Schedule:
        return Schedule(TILE_ROWS, 1 + self.mainloop.warps)


class Fp8WgradKernel:
    """The kernel of a configuration, as `cute.compile` takes it."""

    warpgroups: ClassVar[bool] = True

    def __init__(self, config: Fp8WgradConfig) -> None:
        self.config = config

    @cute.jit
    def __call__(
        self,
        d: Fp8Ptr,
        d_scale: Fp32Ptr,
        v: Fp8Ptr,
        v_scale: Fp32Ptr,
        dw: Bf16Ptr,
        offsets: IntPtr,
        order: IntPtr,
        counter: IntPtr,
        T: Int32,
        O: Int32,  # noqa: E741
        I: Int32,  # noqa: E741
        L: Int32,
        ctas: Int32,
        parts: Int32,
        d_block_stride: Int32,
        d_channel_stride: Int32,
        v_block_stride: Int32,
        v_channel_stride: Int32,
        zero: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Launch.

        Args:
            d, v: [O, T] and [I, T], contiguous, T a multiple of 128; scales fp32 [T / 128, blocks],
                or channels with config.vector.
            dw: [L, O, I], bf16 or fp32. order: int32 [L]; read only with config.ordered.
            offsets: int32 [L + 1], multiples of 128.
            counter: int32 [1], 0 before and after.
            parts: of O. zero: 0, unknown to the compiler.
        """
        config, loop = self.config, self.config.mainloop
        one = Int32(1)
        mD = activations(cute.recast_ptr(d, dtype=loop.types[0]), O, T, one)
        mV = weights(v, I, T, one, one)
        wide_i = cute.assume(Int64(I), divby=64)
        plane = cute.assume(Int64(O) * Int64(I), divby=64)
        if cutlass.const_expr(config.fp32_out):
            dw = cute.recast_ptr(dw, dtype=Float32)
        shape = (cute.assume(O, divby=64), cute.assume(I, divby=64), L)
        mW = cute.make_tensor(dw, cute.make_layout(shape, stride=(wide_i, 1, plane)))
        of_d = cute.make_tensor(
            d_scale, cute.make_layout((1, 1), stride=(d_block_stride, d_channel_stride))
        )
        blocks = I if cutlass.const_expr(config.vector) else (I + (BLOCK - 1)) // BLOCK
        of_v = cute.make_tensor(
            v_scale, cute.make_layout((1, blocks), stride=(v_block_stride, v_channel_stride))
        )
        self.kernel(
            loop.tma(mD, mV),
            config.output.tma(mW),
            loop.tiled_mma(),
            mD,
            (O, I),
            (of_d, of_v, O // parts, zero),
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
        loads: tuple[Any, Any, Any, Any],
        stores: tuple[Any, Any],
        tiled_mma: cute.TiledMma,
        mD: cute.Tensor,
        shape: tuple[Int32, Int32],
        scales: tuple[Any, ...],
        offsets: cute.Tensor,
        order: cute.Tensor,
        counter: cute.Tensor,
        experts: Int32,
        ctas: Int32,
    ) -> None:
        config = self.config
        loop = config.mainloop
        layout = struct(
            schedule=config.schedule.storage(),
            mainloop=loop.storage(),
            output=config.output.storage(),
        )
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP_THREADS)
        storage = cutlass.utils.SmemAllocator().allocate(layout)
        tiles = ExpertTiles(
            offsets,
            order,
            config.ordered,
            config.schedule.band,
            experts,
            (shape[0] + (TILE_ROWS - 1)) // TILE_ROWS,
            (shape[1] + (loop.columns - 1)) // loop.columns,
        )
        scheduler = Scheduler(
            config.schedule, storage.schedule, offsets, counter, experts, tiles.column_tiles
        )
        if warp == 0:
            for descriptor in (loads[0], loads[2], stores[0]):
                cpasync.prefetch_descriptor(descriptor)
            scheduler.init_barriers()
            loop.ring(storage.mainloop).init_barriers()
        # Barriers must be visible to all threads, and to TMA, before anybody waits at one.
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if group == 0:
            cute.arch.setmaxregister_decrease(loop.registers[0])
            if warp == 0:
                load = loop.producer(storage.mainloop, loads, mD, None)
                self._load(load, scheduler, tiles, ctas)
        else:
            cute.arch.setmaxregister_increase(loop.registers[1])
            thread = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * 32 - GROUP_THREADS
            strategy = VectorWgradMma if config.vector else Fp8WgradMma
            mma = strategy(loop, storage.mainloop, tiled_mma, group - 1, scales)
            self._compute(mma, _Stores(config, storage.output, thread, stores, shape), scheduler)
        cute.arch.sync_threads()

    @cute.jit
    def _load(self, load: Any, scheduler: Scheduler, tiles: ExpertTiles, ctas: Int32) -> None:
        """Loading warp: tiles to stages; half-way through a tile it finds the next one."""
        columns = self.config.columns
        first = Int32(0)
        tile = scheduler.first()
        named, begin, end = tiles.window(first)
        first, named, begin, end, row, stop, position, expert = tiles.locate(
            tile, first, named, begin, end
        )
        scheduler.send(Int32(0), row, stop, position, expert)
        if expert < 0:
            scheduler.finish(tile, ctas, tiles.each * tiles.experts)
        number, state = Int32(0), load.ring.producer_state()
        row, stop, position, expert = scheduler.read(number)
        while expert >= 0:
            claimed = scheduler.claim()
            down, across = unpack(position)
            block, behind = row // BLOCK, stop // BLOCK
            middle = block + (behind - block + 1) // 2
            at = (down * TILE_ROWS, across * columns, Int32(0), Int32(columns // 2))
            state = load(state, (), *at, block, middle)
            tile = scheduler.claimed_tile(claimed)
            first, named, begin, end, next_row, next_stop, next_position, next_expert = (
                tiles.locate(tile, first, named, begin, end)
            )
            scheduler.send(number + 1, next_row, next_stop, next_position, next_expert)
            if next_expert < 0:
                scheduler.finish(tile, ctas, tiles.each * tiles.experts)
            state = load(state, (), *at, middle, behind)
            number += 1
            row, stop, position, expert = scheduler.read(number)

    @cute.jit
    def _compute(self, mma: Fp8WgradMma, stores: "_Stores", scheduler: Scheduler) -> None:
        """Multiplying warp group: stages to accumulators to a tile of dw."""
        store, rows = stores.store, stores.shape[0]
        number, filled = Int32(0), Int32(0)
        row, stop, position, expert = scheduler.read(number)
        while expert >= 0:
            down, across = unpack(position)
            tile_expert, blocks = expert, (stop - row) // BLOCK
            if blocks > 0:
                mma(filled, row // BLOCK, blocks, down, across, rows)
            filled += blocks
            number += 1
            row, stop, position, expert = scheduler.read(number)
            if blocks > 0:
                store()(mma.tile, down, across, tile_expert)
            else:
                if cutlass.const_expr(self.config.zeros and not self.config.add):
                    store().zeros(down, across, tile_expert)
        store().finish()


class _Stores:
    """Creates a `Store` for each tile, so that its addresses hold no registers over the product."""

    def __init__(
        self, config: Fp8WgradConfig, storage: Any, first: Int32, tma: Any, shape: Any
    ) -> None:
        """`first` thread of the warp, counted from the first multiplying one."""
        self.config, self.storage, self.first = config, storage, first
        self.tma, self.shape = tma, shape

    def store(self) -> Store:
        thread, config = self.first + ptx.lane(), self.config
        mma = layout_mma(config.columns)
        return Store(config.output, self.storage, mma, thread, self.tma, self.shape)
