"""The product of a weight gradient in FP8: stages of `fp8.mainloop`, of operands by channels.

Both operands are stored by channels, an expert's tokens side by side and padded with zeros to whole
blocks of 128 (`QuantizedColumns`), so that the contraction is contiguous, all stages are whole, and
no stage holds tokens of two experts. A block of 128 tokens has a scale for 128 channels of an
operand, and the product of two of them is that of many accumulators.

Roles and the way of a stage (the kernel's are in `kernel`, the barriers in `gemm.ring.Ring`):

    warp 0          TMA of both operands (`ColumnLoads`): 1 arrival at full, and its bytes
    warps 4 - 11    wgmma of a block, then its sums times the scales to the accumulators
                    (`Fp8WgradMma`); 8 arrivals at empty, once the wgmma have ended
"""

from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode

from phalanx.kernels.sm90.fp8.mainloop import (
    BLOCK,
    Fp8Mainloop,
    Promotion,
    Scales,
    activations,
    address,
    weights,
)
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, MMA_GROUPS, TILE_ROWS
from phalanx.kernels.sm90.gemm.ring import State
from phalanx.kernels.sm90.gemm.tile_scheduler import unpack
from phalanx.kernels.sm90.jit import ptx
from phalanx.kernels.sm90.wgrad.kernel import Factor

_ROWS = TILE_ROWS // MMA_GROUPS  # rows of a warp group; O and I are multiples of them


class Fp8WgradMma(Promotion):
    """Side of a multiplying warp group, with scales of 128 x 128."""

    def __init__(
        self, loop: Fp8Mainloop, storage: Any, tiled_mma: cute.TiledMma, rows: Int32, scales: Any
    ) -> None:
        """`rows`: O. `scales`: of d and v [blocks of T, blocks of C], channels of d's parts, 0."""
        group = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // GROUP_THREADS) - 1
        super().__init__(loop, storage, tiled_mma, group)
        self.rows = rows
        self.of_d, self.of_v, self.each, self.zero = scales
        shape = layout_mma(loop.columns).partition_shape_C((TILE_ROWS, loop.columns))
        # The flat accumulators as those of one wgmma over all columns, which is what `Store` takes.
        self.tile = cute.make_tensor(self.acc.iterator, cute.make_layout(shape))

    def of_segment(self, tiled_mma: cute.TiledMma, operands: tuple[Any, ...]) -> "Fp8WgradMma":
        other = copy(self)
        other.tiled_mma = tiled_mma
        other.of_d, other.of_v, *_ = operands[2]
        return other

    def begin(self) -> Int32:
        return Int32(0)

    def size(self, row: Int32, stop: Int32) -> Int32:
        # Offsets are those of padded tokens: experts have whole blocks.
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
        # O may end in the middle of a tile. The second group then releases its stages unread.
        channel = down * TILE_ROWS + self.group * _ROWS
        if channel < self.rows:
            scales = self._scales(row // BLOCK, channel, across)
            self.multiply(filled, blocks, scales, add)
        else:
            self.skip(filled, blocks)
        return filled

    def advance(self, filled: Int32, blocks: Int32) -> Int32:
        # Blocks of all tiles give stage and phase (`Ring.position`).
        return filled + blocks

    def _scales(self, block: Int32, channel: Int32, across: Int32) -> Scales:
        """Scales of the tile: 64 channels of a warp group are within one block, as each 64 of v."""
        # d may have two parts, the gate and the linear half of dh, in which blocks restart; v has
        # one.
        second = cutlass.select_(channel >= self.each, Int32(1), Int32(0))
        behind = channel - second * self.each
        of_part = (self.each + (BLOCK - 1)) // BLOCK
        # The second block of a tile may lie past I: any scale that exists will do, as v is zero
        # there.
        n, last = across * self.loop.columns, Int32(self.of_v.shape[1]) - 1
        low, high = cutlass.min(n // BLOCK, last), cutlass.min(n // BLOCK + 1, last)
        # Not uniform to the compiler, as in `fp8.mainloop.Fp8MmaConsumer`.
        lane_zero = ptx.lane() * self.zero
        d = address(self.of_d, block, second * of_part + behind // BLOCK + lane_zero)
        blocks = (low,) if self.loop.columns == BLOCK else (low, high)
        v = [address(self.of_v, block, at + lane_zero) for at in blocks]
        return Scales(
            # One scale for both rows of a lane, and along the contraction a step of one block of
            # tokens.
            (d,),
            4 * Int64(self.of_d.stride[0]),
            tuple(v),
            4 * Int64(self.of_v.stride[0]),
            n % BLOCK == 0,
        )


def layout_mma(columns: int) -> cute.TiledMma:
    """MMA whose accumulators have the layout of a tile's, whatever the type of its operands."""
    major = OperandMajorMode.K
    return hopper.make_trivial_tiled_mma(
        *(BFloat16, BFloat16, major, major, Float32),
        (MMA_GROUPS, 1, 1),
        tiler_mn=(_ROWS, columns),
    )


@dataclass(frozen=True)
class Fp8Contraction:
    """A `WgradMath` of operands in FP8."""

    columns: int  # columns of a tile, of I: 128, 192 or 256
    rows_format: str = "e4m3"  # format of d
    stages: int = 1

    loading_warps: ClassVar[int] = 1
    store_for_each_tile: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.columns not in (128, 192, 256):
            raise ValueError(f"columns={self.columns}: tiles have 128, 192 or 256 columns")

    @property
    def mainloop(self) -> Fp8Mainloop:
        return Fp8Mainloop(self.columns, stages=self.stages, rows_format=self.rows_format)

    @property
    def stage_bytes(self) -> int:
        return self.mainloop.stage_bytes

    @property
    def registers(self) -> tuple[int, int]:
        return self.mainloop.registers

    def operands(
        self, d: Factor, v: Factor, index: cute.Pointer
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """d as [O, T, 1], O and I, and their scales; there is no index."""
        # To the main loop d has the rows and v the columns of a product with one part and one
        # expert: the experts are ranges of the contraction.
        loop, one, T = self.mainloop, Int32(1), d.tokens
        of_d, of_v = loop.types
        mD = activations(cute.recast_ptr(d.data, dtype=of_d), d.channels, T, one)
        mV = weights(cute.recast_ptr(v.data, dtype=of_v), v.channels, T, one, one)
        scales = (
            _scales(d, 1),
            _scales(v, (v.channels + (BLOCK - 1)) // BLOCK),
            d.channels // d.parts,
            Int32(0),  # unknown to the compiler, see `Fp8MmaConsumer`
        )
        return loop.tma(mD, mV), (mD, (d.channels, v.channels), scales)

    def tiled_mma(self) -> cute.TiledMma:
        return self.mainloop.tiled_mma()

    def output_mma(self, tiled_mma: cute.TiledMma) -> cute.TiledMma:
        return layout_mma(self.columns)

    def shape(self, operands: tuple[Any, ...]) -> tuple[Int32, Int32]:
        O, I = operands[1]  # noqa: E741
        return O, I

    def storage(self) -> Any:
        return self.mainloop.storage()

    def init_barriers(self, storage: Any) -> None:
        self.mainloop.ring(storage).init_barriers()

    def loader(self, storage: Any, loads: Any, operands: Any, warp: Int32) -> "ColumnLoads":
        return ColumnLoads(self, storage, loads, operands)

    def clear(self, storage: Any) -> None:
        """Nothing to clear: stages are whole."""

    def multiplier(self, storage: Any, tiled_mma: cute.TiledMma, operands: Any) -> Fp8WgradMma:
        return Fp8WgradMma(self.mainloop, storage, tiled_mma, operands[1][0], operands[2])


class ColumnLoads:
    """The loading warp: TMA of whole stages of both operands."""

    def __init__(self, loop: Fp8Contraction, storage: Any, loads: Any, operands: Any) -> None:
        self.columns = loop.columns
        self.load = loop.mainloop.producer(storage, loads, operands[0], None)

    def state(self) -> State:
        return self.load.ring.producer_state()

    def begin(self, row: Int32, stop: Int32, position: Int32) -> tuple[Any, ...]:
        """A tile's place, its first block of tokens, the middle one and the one behind the last."""
        down, across = unpack(position)
        # Blocks along the contraction, which begins at the expert's first token, not at 0.
        block, behind = row // BLOCK, stop // BLOCK
        # v's columns lie side by side: the second half of the tile follows the first one.
        at = (down * TILE_ROWS, across * self.columns, Int32(0), Int32(self.columns // 2))
        return at, block, block + (behind - block + 1) // 2, behind

    def half(
        self, state: State, tile: tuple[Any, ...], second: bool
    ) -> tuple[State, tuple[Any, ...]]:
        at, block, middle, behind = tile
        first, last = (middle, behind) if second else (block, middle)
        return self.load(state, (), *at, first, last), tile


def _scales(x: Factor, blocks: Any) -> cute.Tensor:
    """[token blocks, channel blocks], of which the kernel reads the given number."""
    # The number of d's blocks is not needed: `_scales` of the product clamps v's alone.
    layout = cute.make_layout((1, blocks), stride=(x.scale_token, x.scale_channel))
    return cute.make_tensor(x.scale, layout)
