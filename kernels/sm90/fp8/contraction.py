"""The product of a weight gradient in FP8: stages of `fp8.mainloop`, of operands by channels.

Both operands are stored by channels, an expert's tokens side by side and padded with zeros to
whole blocks of 128 (`QuantizedColumns`), so that the contraction is contiguous, all stages are
whole, and no stage holds tokens of two experts. The scales are those of `wgrad_mma`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass.cute as cute
from cutlass import Int32

from phalanx.kernels.sm90.experts.wgrad_operands import Factor
from phalanx.kernels.sm90.fp8.mainloop import Fp8Mainloop, activations, weights
from phalanx.kernels.sm90.fp8.promotion import BLOCK
from phalanx.kernels.sm90.fp8.wgrad_mma import Fp8WgradMma, layout_mma
from phalanx.kernels.sm90.gemm.expert_tiles import unpack
from phalanx.kernels.sm90.gemm.mainloop import TILE_ROWS
from phalanx.kernels.sm90.gemm.ring import State


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
        loop, one, T = self.mainloop, Int32(1), d.tokens
        of_d, of_v = loop.types
        mD = activations(cute.recast_ptr(d.data, dtype=of_d), d.channels, T, one)
        mV = weights(cute.recast_ptr(v.data, dtype=of_v), v.channels, T, one, one)
        scales = (
            _scales(d, 1),
            _scales(v, (v.channels + (BLOCK - 1)) // BLOCK),
            d.channels // d.parts,
            Int32(0),  # unknown to the compiler, see `promotion.Fp8MmaConsumer`
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
        """`loads` and `operands` as `Fp8Contraction.operands` returns them."""
        self.columns = loop.columns
        self.load = loop.mainloop.producer(storage, loads, operands[0], None)

    def state(self) -> State:
        """Pipeline state before the first tile."""
        return self.load.ring.producer_state()

    def begin(self, row: Int32, stop: Int32, position: Int32) -> tuple[Any, ...]:
        """Start a tile. Its two halves share its place, its first block of tokens, the middle one
        and the one behind the last."""
        down, across = unpack(position)
        block, behind = row // BLOCK, stop // BLOCK
        at = (down * TILE_ROWS, across * self.columns, Int32(0), Int32(self.columns // 2))
        return at, block, block + (behind - block + 1) // 2, behind

    def half(
        self, state: State, tile: tuple[Any, ...], second: bool
    ) -> tuple[State, tuple[Any, ...]]:
        """Load the first or the second half of a tile's blocks."""
        at, block, middle, behind = tile
        first, last = (middle, behind) if second else (block, middle)
        return self.load(state, (), *at, first, last), tile


def _scales(x: Factor, blocks: Any) -> cute.Tensor:
    """[token blocks, channel blocks], the sizes of which the kernel reads being given."""
    layout = cute.make_layout((1, blocks), stride=(x.scale_token, x.scale_channel))
    return cute.make_tensor(x.scale, layout)
