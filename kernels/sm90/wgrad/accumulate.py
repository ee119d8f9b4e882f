"""From accumulators to a weight gradient: written in bf16 or fp32, or added in fp32.

A warp group owns 64 rows of a tile and passes them on in blocks of 128 bytes a row (64 columns of
bf16, 32 of fp32) through its own swizzled buffers in shared memory; TMA stores a block, or adds it
in L2 (one addition an element and launch, so the sum does not depend on who comes first). O and I
are multiples of 64: a block is there or not. The last blocks leave under the next tile's product.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.utils import LayoutEnum

from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, MMA_GROUPS
from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit import ptx

_ROWS = 64  # rows of a warp group
_ROW_BYTES = 128
_ATOM = 8  # columns that four neighbouring threads hold together, two each


@dataclass(frozen=True)
class Output:
    """Compiled-in choices. Used while tracing, on host and device side."""

    columns: int
    fp32_out: bool  # fp32, not bf16
    add: bool  # add to the tensor instead of overwriting it
    buffers: int  # blocks of a warp group that may be in flight

    @property
    def dtype(self) -> Any:
        return Float32 if self.fp32_out else BFloat16

    @property
    def block(self) -> int:
        # Columns of a buffer: 128 bytes, which is the widest swizzle.
        return 8 * _ROW_BYTES // self.dtype.width

    @property
    def bytes(self) -> int:
        return self.buffers * MMA_GROUPS * _ROWS * _ROW_BYTES

    def smem_layout(self, groups: int) -> cute.ComposedLayout:
        """The buffers as blocks of `groups` * 64 rows: of the tile (2), or of a warp group (1)."""
        blocks = self.buffers * MMA_GROUPS // groups
        shape = (groups * _ROWS, self.block)
        return hopper.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, shape, blocks)

    def tma(self, mW: cute.Tensor) -> tuple[Any, Any]:
        layout = cute.slice_(self.smem_layout(1), (None, None, 0))
        if self.add:
            # L2 adds: the SM neither reads the sum nor waits for it.
            op: Any = cpasync.CopyReduceBulkTensorTileS2GOp()
        else:
            op = cpasync.CopyBulkTensorTileS2GOp()
        atom = cpasync.make_tiled_tma_atom(op, mW, layout, (_ROWS, self.block))
        return atom[0], atom[1]

    def storage(self) -> Any:
        return struct(blocks=array(self.dtype, cute.cosize(self.smem_layout(1)), 1024))


class Store:
    """The device side, for one warp group."""

    def __init__(
        self,
        config: Output,
        storage: Any,
        tiled_mma: cute.TiledMma,
        thread: Int32,
        tma: tuple[Any, Any],
        shape: tuple[Int32, Int32],
    ) -> None:
        """`thread` counts from the first multiplying thread; `shape` is (O, I)."""
        self.config, self.shape = config, shape
        self.atom, tensor = tma
        self.thread = thread % GROUP_THREADS
        self.group = cute.arch.make_warp_uniform(thread // GROUP_THREADS)
        self.first_warp = cute.arch.make_warp_uniform(self.thread // 32) == 0
        # Named barriers 1 and 2, one a group: 0 belongs to sync_threads.
        self.barrier = pipeline.NamedBarrier(barrier_id=1 + self.group, num_threads=GROUP_THREADS)
        block = config.smem_layout(1)
        blocks = storage.blocks.get_tensor(block.outer, swizzle=block.inner)
        # Blocks of 64 rows of the whole tensor: row, column and expert are coordinates.
        tiles = cute.local_tile(tensor, (_ROWS, config.block), (None, None, None))
        self.from_smem, self.to_gmem = cpasync.tma_partition(
            self.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(blocks, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        self.base = storage.blocks.data_ptr()
        if not config.fp32_out:
            tile = config.smem_layout(MMA_GROUPS)
            stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
            per_atom = cute.make_tiled_copy_C_atom(stmatrix, tiled_mma)
            self.to_smem = cute.make_tiled_copy_S(stmatrix, per_atom)
            # Both groups share the MMA: a thread's number in both gives its rows of a tile of 128.
            # Buffers of the two groups therefore alternate, and one of `tile` is two of `block`.
            slice_ = self.to_smem.get_slice(thread)
            tiled = storage.blocks.get_tensor(tile.outer, swizzle=tile.inner)
            self.smem = slice_.partition_D(tiled)
            self.fragment = cute.shape(slice_.partition_S(tiled))[:3]

    @cute.jit
    def __call__(self, acc: cute.Tensor, row: Int32, column: Int32, expert: Int32) -> None:
        """Store or add the tile in row and column `row` and `column` of the expert's tiles."""
        config = self.config
        top, left = row * MMA_GROUPS + self.group, column * (config.columns // config.block)
        # O is a multiple of 64: a group has all of its rows or none, and so meets at its barrier
        # with all threads or with none.
        if top * _ROWS < self.shape[0]:
            # The last tile's blocks drained under this one's product: the wait is short, and all
            # buffers are free after it.
            self._wait(0)
            for j in cutlass.range_constexpr(config.columns // config.block):
                # Blocks that are absent come last, so that `_wait` counts those that were sent.
                if (left + j) * config.block < self.shape[1]:
                    buffer = j % config.buffers
                    if cutlass.const_expr(j >= config.buffers):
                        # The store that used this buffer is the oldest one in flight.
                        self._wait(config.buffers - 1)
                    # The first warp alone waited for its stores: the others may write after this.
                    if cutlass.const_expr(j == 0 or j >= config.buffers):
                        self.barrier.arrive_and_wait()
                    if cutlass.const_expr(config.fp32_out):
                        self._write(acc, j, buffer)
                    else:
                        self._round(acc, j, buffer)
                    # Writes of all 128 threads (generic proxy) before the TMA store (async proxy).
                    cute.arch.fence_proxy("async.shared", space="cta")
                    self.barrier.arrive_and_wait()
                    # One warp issues, waits and counts: bulk groups belong to a thread.
                    if self.first_warp:
                        self._send(buffer, top, left + j, expert)
                        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def zeros(self, row: Int32, column: Int32, expert: Int32) -> None:
        """Store a tile of zeros, all its blocks from one buffer."""
        config = self.config
        top, left = row * MMA_GROUPS + self.group, column * (config.columns // config.block)
        if top * _ROWS < self.shape[0]:
            self._wait(0)
            self.barrier.arrive_and_wait()
            # After the barrier no store reads the buffer any more.
            zero = cute.make_rmem_tensor(4, Float32)
            # Zeros look the same swizzled: the buffer is filled straight through.
            zero.fill(0.0)
            for piece in cutlass.range_constexpr(_ROWS * _ROW_BYTES // (16 * GROUP_THREADS)):
                at = (piece * GROUP_THREADS + self.thread) * 4
                cute.autovec_copy(zero, cute.make_tensor(self._words(0, at).align(16), 4))
            cute.arch.fence_proxy("async.shared", space="cta")
            self.barrier.arrive_and_wait()
            if self.first_warp:
                # Several stores may read one buffer; they are one group for `_wait`.
                for j in cutlass.range_constexpr(config.columns // config.block):
                    if (left + j) * config.block < self.shape[1]:
                        self._send(0, top, left + j, expert)
                cute.arch.cp_async_bulk_commit_group()

    def finish(self) -> None:
        self._wait(0)

    @cute.jit
    def _wait(self, pending: cutlass.Constexpr) -> None:
        if self.first_warp:
            # read=True: the buffers may be overwritten. That memory is written is only due when the
            # kernel ends.
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    def _send(self, buffer: int, top: Int32, left: Int32, expert: Int32) -> None:
        # Buffers of the groups alternate, see `__init__`.
        stage = buffer * MMA_GROUPS + self.group
        cute.copy(self.atom, self.from_smem[(None, stage)], self.to_gmem[(None, top, left, expert)])

    def _words(self, buffer: int, at: Int32) -> cute.Pointer:
        block = (buffer * MMA_GROUPS + self.group) * (_ROWS * _ROW_BYTES // 4)
        return cute.recast_ptr(self.base, dtype=Float32) + (block + at)

    @cute.jit
    def _write(self, acc: cute.Tensor, j: cutlass.Constexpr, buffer: cutlass.Constexpr) -> None:
        """Write block j of the tile to shared memory in fp32.

        A thread's accumulators come in fours, an atom of 8 columns each: two neighbouring columns
        of a row, then of the row 8 below. With the swizzle alone, rows would share banks in pairs,
        so odd rows write the atoms of a block in another order than even ones.
        """
        lane = self.thread % 32
        below, quarter = lane // 4, lane % 4
        # Of the two rows of a lane the first; the warp has 16.
        row = self.thread // 32 * 16 + below
        odd = below % 2 == 1
        count = self.config.block // _ATOM
        for n in cutlass.range_constexpr(count):
            atom = cutlass.select_(odd, Int32(n ^ 2), Int32(n))
            # 16-byte chunk c of row r lies at c ^ (r % 8), as TMA reads it.
            chunk = (2 * atom + quarter // 2) ^ below
            at = row * (_ROW_BYTES // 4) + chunk * 4 + quarter % 2 * 2
            pair = cute.make_rmem_tensor(2, Float32)
            for lower in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(2):
                    # Selected in registers: an index that depends on the lane would move the
                    # accumulators to local memory.
                    even_index = 4 * (j * count + n) + 2 * lower + i
                    odd_index = 4 * (j * count + (n ^ 2)) + 2 * lower + i
                    pair[i] = cutlass.select_(odd, acc[odd_index], acc[even_index])
                words = self._words(buffer, at + lower * 8 * (_ROW_BYTES // 4))
                cute.autovec_copy(pair, cute.make_tensor(words.align(8), 2))

    @cute.jit
    def _round(self, acc: cute.Tensor, j: cutlass.Constexpr, buffer: cutlass.Constexpr) -> None:
        rounded = cute.make_rmem_tensor(cute.make_layout(self.fragment).shape, BFloat16)
        values = cute.make_rmem_tensor(cute.make_layout(self.fragment).shape, Float32)
        source = self.to_smem.retile(acc)
        count = cute.size(values)
        for i in cutlass.range_constexpr(count):
            # Block j of the accumulators: `retile` lists them block by block.
            values[i] = source[j * count + i]
        rounded.store(values.load().to(BFloat16))
        cute.copy(self.to_smem, rounded, self.smem[(None, None, None, buffer)])


class Stores:
    """The `Store` of a multiplying thread: `get` returns the one for the current tile."""

    def __init__(
        self,
        each: bool,
        config: Output,
        storage: Any,
        tiled_mma: cute.TiledMma,
        tma: tuple[Any, Any],
        shape: tuple[Int32, Int32],
    ) -> None:
        """`each`: make one a tile, whose addresses then hold no registers over the product."""

        def store(thread: Int32) -> Store:
            return Store(config, storage, tiled_mma, thread, tma, shape)

        if each:
            # `ptx.lane` is read anew for each tile, so that nothing of the store lives over the
            # product.
            warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) * 32 - GROUP_THREADS
            self.get = lambda: store(warp + ptx.lane())
        else:
            made = store(cute.arch.thread_idx()[0] - GROUP_THREADS)
            self.get = lambda: made
