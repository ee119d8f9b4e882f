"""The product of a weight gradient in FP8: a thread's scales, and its sums.

A block of 128 tokens has a scale for 128 channels of an operand, and the product of two of them is
that of many accumulators, as in `promotion`.
"""

from copy import copy
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode

from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop
from phalanx.kernels.sm90.fp8.promotion import BLOCK, Promotion, Scales, address
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, MMA_GROUPS, TILE_ROWS
from phalanx.kernels.sm90.jit import ptx

_ROWS = TILE_ROWS // MMA_GROUPS  # rows of a warp group; O and I are multiples of them


class Fp8WgradMma(Promotion):
    """Side of a multiplying warp group, with scales of 128 x 128."""

    def __init__(
        self, loop: Fp8Mainloop, storage: Any, tiled_mma: cute.TiledMma, rows: Int32, scales: Any
    ) -> None:
        """`rows`: O. `scales`: of d and of v [blocks of T, blocks of C], channels of a part of d,
        and 0."""
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP_THREADS) - 1
        super().__init__(loop, storage, tiled_mma, group)
        self.rows = rows
        self.of_d, self.of_v, self.each, self.zero = scales
        shape = layout_mma(loop.columns).partition_shape_C((TILE_ROWS, loop.columns))
        # The flat accumulators as those of one wgmma over all columns, which is what `Store` takes.
        self.tile = cute.make_tensor(self.acc.iterator, cute.make_layout(shape))

    def of_segment(self, tiled_mma: cute.TiledMma, operands: tuple[Any, ...]) -> "Fp8WgradMma":
        """The side for another segment, with the same accumulators."""
        other = copy(self)
        other.tiled_mma = tiled_mma
        other.of_d, other.of_v, *_ = operands[2]
        return other

    def begin(self) -> Int32:
        """Stages filled before the first tile."""
        return Int32(0)

    def size(self, row: Int32, stop: Int32) -> Int32:
        """Token blocks of an expert."""
        return (stop - row) // BLOCK

    @cute.jit
    def __call__(
        self,
        filled: Int32,
        row: Int32,
        blocks: Int32,
        down: Int32,
        across: Int32,
        add: Any = False,
    ) -> Int32:
        """Multiply `blocks` stages from number `filled` on: those of the tokens from `row` on.

        `down` and `across` are the tile's row and column; `add` to the accumulator, or overwrite
        it.
        """
        channel = down * TILE_ROWS + self.group * _ROWS
        if channel < self.rows:
            scales = self._scales(row // BLOCK, channel, across)
            self.multiply(filled, blocks, scales, add)
        else:
            self.skip(filled, blocks)
        return filled

    def advance(self, filled: Int32, blocks: Int32) -> Int32:
        """Stages filled after a tile of so many blocks."""
        return filled + blocks

    def _scales(self, block: Int32, channel: Int32, across: Int32) -> Scales:
        """Scales of the tile: 64 channels of a warp group are within one block of d, as each 64 of
        v."""
        second = cutlass.select_(channel >= self.each, Int32(1), Int32(0))
        behind = channel - second * self.each
        of_part = (self.each + (BLOCK - 1)) // BLOCK
        n, last = across * self.loop.columns, Int32(self.of_v.shape[1]) - 1
        low, high = cutlass.min(n // BLOCK, last), cutlass.min(n // BLOCK + 1, last)
        # Not uniform to the compiler, as in `promotion.Fp8MmaConsumer`.
        lane_zero = ptx.lane() * self.zero
        d = address(self.of_d, block, second * of_part + behind // BLOCK + lane_zero)
        blocks = (low,) if self.loop.columns == BLOCK else (low, high)
        v = [address(self.of_v, block, at + lane_zero) for at in blocks]
        return Scales(
            (d,),
            4 * Int64(self.of_d.stride[0]),
            tuple(v),
            4 * Int64(self.of_v.stride[0]),
            n % BLOCK == 0,
        )


def layout_mma(columns: int) -> cute.TiledMma:
    """MMA whose accumulators have the layout of a tile's; the type of its operands does not
    matter."""
    major = OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(
        *(BFloat16, BFloat16, major, major, Float32),
        (MMA_GROUPS, 1, 1),
        tiler_mn=(_ROWS, columns),
    )
