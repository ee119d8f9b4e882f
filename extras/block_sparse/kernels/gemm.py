"""A grouped GEMM whose tiles multiply the living blocks of weights alone, with any `Epilogue`.

    acc[s, n] = sum of a[index[s], k] * b[e(s), n, k] over k of the living blocks that n is in

Roles, pipelines and barriers are those of `kernels.sm90.gemm.gemm`; two things differ. The stages
of a tile are those of its list (`mainloop`), and their number is part of the tile's record: the
scheduling warp reads it with its look-up, half a tile ahead, and both multiplying groups add up the
stages of all tiles, those of the other group too, to find theirs in the ring.

Legend: S expert rows, K channels in, N columns of b, L experts.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor

from phalanx.extras.block_sparse.kernels.lists import BLOCK, MOST, Contraction
from phalanx.extras.block_sparse.kernels.mainloop import STAGES, SparseProducer
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90.experts.fused_gemm import FusedGemmKernel, Vectors, prepared
from phalanx.kernels.sm90.gemm.epilogues import Epilogue, Linear
from phalanx.kernels.sm90.gemm.gemm import Arguments, Gemm, GemmConfig
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, TILE_ROWS, Mainloop
from phalanx.kernels.sm90.gemm.operands import is_transposed
from phalanx.kernels.sm90.gemm.row_store import StripStore, StripWalk
from phalanx.kernels.sm90.gemm.tensors import Rows, Weights
from phalanx.kernels.sm90.gemm.tile_scheduler import Scheduler
from phalanx.kernels.sm90.jit.launch import launch_persistent, require
from phalanx.kernels.sm90.jit.pointers import Bf16Ptr, IntPtr

_COUNT_SHIFT = 16  # the third number of a record: a column tile, and the blocks of its list


@dataclass(frozen=True)
class Plain(Linear):
    """`Linear` whose arguments are those that it declares: it never signals."""

    def device(self, loop: Mainloop, storage: Any, thread: Int32, args: Any) -> StripWalk:
        return StripWalk(StripStore(self, loop), storage, thread, args)


def _packed(counts: cute.Tensor, column: Int32, expert: Int32) -> Int32:
    """The third number of a tile's record; without a tile (expert -1) it is not read."""
    return column | counts[cutlass.max(expert, 0), column] << _COUNT_SHIFT


def _unpacked(packed: Int32) -> tuple[Int32, Int32]:
    """Column tile, and stages of its list."""
    return packed & ((1 << _COUNT_SHIFT) - 1), (packed >> _COUNT_SHIFT) * STAGES


class SparseGemm(Gemm):
    """Device side."""

    @cute.jit
    def load(
        self, arguments: Arguments, storage: Any, shared: tuple[Scheduler, Int32], warp: Int32
    ) -> None:
        loop, x = self.config.mainloop, arguments
        _, (blocks, counts) = x.epilogue
        load = SparseProducer(
            *(loop, storage.mainloop, x.loads, x.mA, x.index),
            blocks=blocks,
        )
        if cutlass.const_expr(loop.gather):
            self._load_tiles(load, *shared, counts, warp, x.half_offset, x.ctas)
        else:
            # As in `Gemm`: one warp keeps up, where rows come by TMA.
            if warp == 0:
                self._load_tiles(load, *shared, counts, warp, x.half_offset, x.ctas)

    @cute.jit
    def compute(
        self, arguments: Arguments, storage: Any, shared: tuple[Scheduler, Int32], group: Int32
    ) -> None:
        loop, (scheduler, zero), x = self.config.mainloop, shared, arguments
        thread = cute.arch.thread_idx()[0] - GROUP_THREADS
        mma = loop.mma_consumer(storage.mainloop, x.tiled_mma, group - 1)
        store = self.config.epilogue.device(loop, storage.epilogue, thread, x.epilogue[0])
        self._compute_tiles(mma, store, scheduler, zero, group - 1)

    @cute.jit
    def _load_tiles(
        self,
        load: SparseProducer,
        scheduler: Scheduler,
        zero: Int32,
        counts: cute.Tensor,
        warp: Int32,
        half_offset: Int32,
        ctas: Int32,
    ) -> None:
        """As `Gemm._load`: claims are issued when a tile begins, and read half-way."""
        leads = (zero == 0) & (warp == 0)
        tile, first, before = Int32(0), Int32(0), Int32(0)
        begin, end, inclusive = Int32(0), Int32(0), Int32(0)
        if leads:
            tile = scheduler.first()
            begin, end, inclusive = scheduler.window(first)
            first, before, begin, end, inclusive, row, stop, column, expert, tiles = (
                scheduler.locate(tile, first, before, begin, end, inclusive)
            )
            scheduler.send(Int32(0), row, stop, _packed(counts, column, expert), expert)
            if expert < 0:
                scheduler.finish(tile, ctas, tiles)
        number = Int32(0)
        state, sources_of, pick = load.ring.producer_state(), load.sources, load.pick
        row, stop, column, expert = scheduler.read(number)
        while expert >= 0:
            claimed = Int32(0)
            if leads:
                claimed = scheduler.claim()
            column, blocks = _unpacked(column)
            first_row, half = row + zero * TILE_ROWS, blocks // 2
            sources = *sources_of(first_row, stop), *pick(column, expert)
            at = (first_row, column * BLOCK, expert, half_offset)
            state = load(state, sources, *at, Int32(0), half)
            if leads:
                tile = scheduler.claimed_tile(claimed)
                first, before, begin, end, inclusive, row, stop, next_column, next_expert, tiles = (
                    scheduler.locate(tile, first, before, begin, end, inclusive)
                )
                packed = _packed(counts, next_column, next_expert)
                scheduler.send(number + 1, row, stop, packed, next_expert)
                if next_expert < 0:
                    scheduler.finish(tile, ctas, tiles)
            state = load(state, sources, *at, half, blocks)
            number += 1
            row, stop, column, expert = scheduler.read(number)

    @cute.jit
    def _compute_tiles(
        self, mma: Any, store: Any, scheduler: Scheduler, zero: Int32, group: Int32
    ) -> None:
        """As `Gemm._compute`, with another number of stages for each tile."""
        loop = self.config.mainloop
        number, carry, prefetch, passed = Int32(0), Int32(0), store.prefetch, Int32(0)
        start = mma.start
        start()
        row, end, column, expert = scheduler.read(number)
        while expert >= 0:
            column, blocks = _unpacked(column)
            mine = True
            if cutlass.const_expr(loop.pingpong):
                mine = number & 1 == group
            if mine:
                first_row = row + zero * TILE_ROWS
                prefetch(first_row, end, column)
                mma(passed, blocks, first_row, end, column, expert)
                carry = store(mma.acc, carry, first_row, end, column, expert)
            passed += blocks
            number += 1
            row, end, column, expert = scheduler.read(number)
        store.finish(carry)


class SparseGemmKernel(SparseGemm, FusedGemmKernel):
    """Arguments by the epilogue's declaration."""

    @cute.jit
    def __call__(
        self,
        a: Rows,
        b: Weights,
        block: IntPtr,
        count: IntPtr,
        loaded: Bf16Ptr,
        first: Rows,
        last: Rows,
        vectors: Vectors,
        index: IntPtr,
        offsets: IntPtr,
        counter: IntPtr,
        ctas: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """block [L, tiles, MOST] and count [L, tiles]: a `Contraction`; others as in the base."""
        tensors = self._tensors(b, loaded, [first, last], vectors)
        args = self.config.epilogue.host(self.config.mainloop, *tensors)
        L, tiles = b.experts, b.columns // (self.config.num_gate_parts * BLOCK)
        listed = (
            cute.make_tensor(
                block, cute.make_layout((L, tiles, MOST), stride=(tiles * MOST, MOST, 1))
            ),
            cute.make_tensor(count, cute.make_layout((L, tiles), stride=(tiles, 1))),
        )
        # The lists go with the epilogue's arguments, which `run` hands on as they are.
        args = args, listed
        self.run(a, b, args, index, offsets, counter, None, last.rows, ctas, stream)


def sparse_gemm(
    a: Tensor,
    b_LNK: Tensor,
    listed: Contraction,
    offsets: Tensor,
    epilogue: Epilogue,
    *,
    loaded: Tensor | None = None,
    index_S: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    **loads: Tensor,
) -> dict[str, Tensor]:
    """`kernels.sm90.experts.fused_gemm.fused_gemm` over the living blocks of b.

    Args:
        b_LNK: bf16, contiguous or the transpose of a contiguous [L, K, N]; N / parts and K are
            multiples of 128. Dead blocks are zero.
        listed: blocks of K for each 128 columns of a part of N: `Blocks.forward`, or `backward` of
            weights that are read transposed.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    L, N, K = b_LNK.shape
    parts = epilogue.product_parts
    if N % (parts * BLOCK) or K % BLOCK:
        raise ValueError(f"b is {[L, N, K]}: {parts} part(s) of N and K must be multiples of 128")
    tiles = N // (parts * BLOCK)
    require(
        a.device,
        block=(listed.block_LTP, torch.int32, (L, tiles, MOST)),
        count=(listed.count_LT, torch.int32, (L, tiles)),
    )
    loop = sparse_loop(parts, transposed=is_transposed(b_LNK), gather=index_S is not None)
    made, arguments = prepared(a, b_LNK, offsets, epilogue, loop, loaded, index_S, loads)
    if arguments["last"].rows and len(a):
        launch_persistent(
            *(SparseGemmKernel, GemmConfig(epilogue, loop), a.device, options, None),
            **dict(**arguments, block=listed.block_LTP, count=listed.count_LT),
        )
    return made


def sparse_loop(parts: int, *, transposed: bool, gather: bool) -> Mainloop:
    """Tiles of 128 columns of an output, with ping-pong; with a gate both groups share a tile."""
    # 256 columns of accumulators, of the gate and the linear half, do not fit into one group.
    return Mainloop(parts * BLOCK, parts == 1, b_transposed=transposed, gather=gather)
