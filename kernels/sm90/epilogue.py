"""From accumulators to rows of the output: bias, rounding to bf16, stores that stop at the expert.

A warp group owns 64 rows of a tile and stores them 64 columns at a time through its own swizzled
buffers in shared memory. 64 rows of one expert leave by TMA; at the ragged end of an expert the
threads copy just the rows that exist, in 16-byte pieces, so that neither the next expert's rows
nor padding is touched. The number of columns is a multiple of 64: a block of them is there or not.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Uint32
from cutlass.cute.nvgpu import CopyUniversalOp, cpasync, warp
from cutlass.utils import LayoutEnum

from kernels.sm90.mainloop import GROUP_THREADS, MATH_GROUPS
from kernels.sm90.storage import array, struct

BLOCK = 64
"""Rows of a warp group, and columns stored at a time."""
_VECTOR = 8
"""Elements of a 16-byte piece."""


@dataclass(frozen=True)
class Epilogue:
    """Choices that are compiled in. Used while tracing, on host and device side."""

    columns: int
    bias: bool
    buffers: int = 2

    @property
    def bytes(self) -> int:
        return 2 * self.buffers * MATH_GROUPS * BLOCK * BLOCK

    def smem_layout(self, groups: int) -> cute.ComposedLayout:
        """The buffers as blocks of `groups` * 64 rows: of the tile (2), or of a warp group (1)."""
        blocks = self.buffers * MATH_GROUPS // groups
        return hopper.make_smem_layout_epi(
            BFloat16, LayoutEnum.ROW_MAJOR, (groups * BLOCK, BLOCK), blocks
        )

    def tma(self, mY: cute.Tensor) -> tuple[Any, Any]:
        """Host side: atom and tensor to store 64 x 64 blocks of Y [rows, N]."""
        layout = cute.slice_(self.smem_layout(1), (None, None, 0))
        made = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mY, layout, (BLOCK, BLOCK)
        )
        return made[0], made[1]

    def storage(self) -> Any:
        """The part of a kernel's shared memory that the buffers need."""
        return struct(blocks=array(BFloat16, cute.cosize(self.smem_layout(1)), 1024))


class Store:
    """The device side, for one warp group."""

    def __init__(
        self,
        config: Epilogue,
        storage: Any,
        tiled_mma: cute.TiledMma,
        thread: Int32,
        tma: tuple[Any, Any],
        mY: cute.Tensor,
        bias: cute.Tensor,
        scale: cute.Tensor,
    ) -> None:
        """`thread` counts from the first multiplying thread; `bias` [experts, N / 2] is words."""
        self.config, self.mY, self.bias, self.scale = config, mY, bias, scale
        self.atom, self.tensor = tma
        self.thread = thread % GROUP_THREADS
        self.group = cute.arch.make_warp_uniform(thread // GROUP_THREADS)
        self.first_warp = cute.arch.make_warp_uniform(self.thread // 32) == 0
        self.barrier = pipeline.NamedBarrier(barrier_id=1 + self.group, num_threads=GROUP_THREADS)
        tile, block = config.smem_layout(MATH_GROUPS), config.smem_layout(1)
        tiles = storage.blocks.get_tensor(tile.outer, swizzle=tile.inner)
        self.blocks = storage.blocks.get_tensor(block.outer, swizzle=block.inner)
        stmatrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16)
        per_atom = cute.make_tiled_copy_C_atom(stmatrix, tiled_mma)
        self.to_smem = cute.make_tiled_copy_S(stmatrix, per_atom)
        slice_ = self.to_smem.get_slice(thread)
        self.smem = slice_.partition_D(tiles)
        self.shape = cute.shape(slice_.partition_S(tiles))[:3]
        whole = cute.make_identity_tensor((MATH_GROUPS * BLOCK, config.columns))
        self.at = tiled_mma.get_slice(thread).partition_C(whole)

    @cute.jit
    def __call__(
        self, acc: cute.Tensor, row: Int32, end: Int32, column: Int32, expert: Int32
    ) -> None:
        """Store the tile whose first row is `row`, of an expert that ends before row `end`."""
        top = row + self.group * BLOCK
        width = self.config.columns // BLOCK
        blocks_n = self.mY.shape[1] // BLOCK
        if top < end:
            s0, s1 = self._scales(row, end)
            self._wait(0)
            for j in cutlass.range_constexpr(width):
                block = column * width + j
                if block < blocks_n:
                    if cutlass.const_expr(j >= self.config.buffers):
                        self._wait(self.config.buffers - 1)
                    if cutlass.const_expr(j == 0 or j >= self.config.buffers):
                        self.barrier.arrive_and_wait()
                    buffer = j % self.config.buffers
                    self._round(acc, j, buffer, column, expert, s0, s1)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    self.barrier.arrive_and_wait()
                    if end - top >= BLOCK:
                        self._store_block(buffer, top, block)
                    else:
                        self._store_rows(buffer, top, end, block)

    def finish(self) -> None:
        """Wait until the last stores have left shared memory."""
        self._wait(0)

    @cute.jit
    def _wait(self, pending: cutlass.Constexpr) -> None:
        if self.first_warp:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)

    @cute.jit
    def _scales(self, row: Int32, end: Int32) -> tuple[Float32, Float32]:
        s0, s1 = Float32(0), Float32(0)
        if cutlass.const_expr(self.config.bias):
            m = self.at[0][0]
            s0 = self.scale[cutlass.min(row + m, end - 1)]
            s1 = self.scale[cutlass.min(row + m + 8, end - 1)]
        return s0, s1

    @cute.jit
    def _round(
        self,
        acc: cute.Tensor,
        j: cutlass.Constexpr,
        buffer: cutlass.Constexpr,
        column: Int32,
        expert: Int32,
        s0: Float32,
        s1: Float32,
    ) -> None:
        """Write block j of the tile, rounded, to shared memory.

        A thread's accumulators come in fours: two neighbouring columns of a row, then of the row 8
        below.
        """
        values = cute.make_rmem_tensor(cute.make_layout(self.shape).shape, Float32)
        rounded = cute.make_rmem_tensor(cute.make_layout(self.shape).shape, BFloat16)
        source = self.to_smem.retile(acc)
        count = cute.size(values)
        for i in cutlass.range_constexpr(count):
            values[i] = source[j * count + i]
        if cutlass.const_expr(self.config.bias):
            first = column * self.config.columns
            for i in cutlass.range_constexpr(0, count, 4):
                n = first + self.at[j * count + i][1]
                word = self.bias[expert, n // 2]
                low, high = _float(word << 16), _float(word & Uint32(0xFFFF0000))
                values[i] += low * s0
                values[i + 1] += high * s0
                values[i + 2] += low * s1
                values[i + 3] += high * s1
        rounded.store(values.load().to(BFloat16))
        cute.copy(self.to_smem, rounded, self.smem[(None, None, None, buffer)])

    @cute.jit
    def _store_block(self, buffer: cutlass.Constexpr, top: Int32, block: Int32) -> None:
        if self.first_warp:
            shifted = cute.domain_offset((top, 0), self.tensor)
            tiles = cute.local_tile(shifted, (BLOCK, BLOCK), (0, None))
            smem, gmem = cpasync.tma_partition(
                self.atom,
                0,
                cute.make_layout(1),
                cute.group_modes(self.blocks, 0, 2),
                cute.group_modes(tiles, 0, 2),
            )
            stage = buffer * MATH_GROUPS + self.group
            cute.copy(self.atom, smem[(None, stage)], gmem[(None, block)])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _store_rows(self, buffer: cutlass.Constexpr, top: Int32, end: Int32, block: Int32) -> None:
        atom = cute.make_copy_atom(CopyUniversalOp(), BFloat16, num_bits_per_copy=16 * _VECTOR)
        pieces = BLOCK // _VECTOR
        threads = cute.make_layout((GROUP_THREADS // pieces, pieces), stride=(pieces, 1))
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, _VECTOR)))
        mine = copy.get_slice(self.thread)
        stage = buffer * MATH_GROUPS + self.group
        source = mine.partition_S(self.blocks[(None, None, stage)])
        shifted = cute.domain_offset((top, 0), self.mY)
        target = mine.partition_D(cute.local_tile(shifted, (BLOCK, BLOCK), (0, block)))
        at = mine.partition_S(cute.make_identity_tensor((BLOCK, BLOCK)))
        for p in cutlass.range_constexpr(cute.size(source, mode=[1])):
            if top + at[(0, 0), p, 0][0] < end:
                piece = cute.make_rmem_tensor(source[None, p, None].shape, BFloat16)
                cute.copy(atom, source[None, p, None], piece)
                cute.copy(atom, piece, target[None, p, None])


def _float(bits: Uint32) -> Float32:
    return bits.bitcast(Float32)
