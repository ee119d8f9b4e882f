"""Tiles of problems in which every expert has as many as any other.

Tiles are numbered expert by expert, in the order in which the caller wants the experts, and looked
up by division. The order of claims, their counting and the reset of the counter are `schedule`'s.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from phalanx.kernels.sm90.gemm.tile_scheduler import raster

_WARP = 32
_ROW_SHIFT = 16


def unpack(position: Int32) -> tuple[Int32, Int32]:
    """Row and column of a tile in its expert's grid, from the record's third number."""
    return position >> _ROW_SHIFT, position & ((1 << _ROW_SHIFT) - 1)


@dataclass(frozen=True)
class ExpertTiles:
    """From a tile's number to its record, in one warp; 32 experts are looked up at a time."""

    offsets: cute.Tensor
    order: cute.Tensor
    """Experts as they are taken; read only if `ordered`."""
    ordered: bool
    band: int
    """Columns of tiles that are walked together, see `raster`."""
    experts: Int32
    row_tiles: Int32
    column_tiles: Int32
    """Tiles of an expert, down and across."""

    @property
    def each(self) -> Int32:
        """Tiles of an expert."""
        return self.row_tiles * self.column_tiles

    @cute.jit
    def window(self, first: Int32) -> tuple[Int32, ...]:
        """Experts number first .. first + 31 of the order, one a lane: expert, begin and end."""
        expert = cutlass.min(first + cute.arch.lane_idx(), self.experts - 1)
        if cutlass.const_expr(self.ordered):
            expert = self.order[expert]
        return expert, self.offsets[expert], self.offsets[expert + 1]

    @cute.jit
    def locate(
        self, tile: Int32, first: Int32, expert: Int32, begin: Int32, end: Int32
    ) -> tuple[Int32, ...]:
        """The record of a tile.

        Args:
            tile: number over all experts.
            first, expert, begin, end: a window, to be given again the next time.

        Returns:
            The window moved to where the tile is, then the expert's first row and the row after its
            last, position (see `unpack`) and expert, -1 if there is no such tile.
        """
        number = tile // self.each
        page = number - number % _WARP
        if number < self.experts and page != first:
            first = page
            expert, begin, end = self.window(first)
        lane = number % _WARP
        row = cute.arch.shuffle_sync(begin, lane)
        stop = cute.arch.shuffle_sync(end, lane)
        found = cute.arch.shuffle_sync(expert, lane)
        if number >= self.experts:
            found = Int32(-1)
        down, across = raster(
            tile - number * self.each, self.row_tiles, self.column_tiles, self.band, cutlass.min
        )
        return first, expert, begin, end, row, stop, down << _ROW_SHIFT | across, found
