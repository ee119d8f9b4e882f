"""Tiles of problems in which all experts have the same number of them, as weight gradients.

Tiles are numbered expert by expert, in the caller's order of experts, and looked up by division.
Claims and the reset of their counter are `tile_scheduler`'s.
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
    # A record has four numbers: row and column of the tile share one.
    return position >> _ROW_SHIFT, position & ((1 << _ROW_SHIFT) - 1)


@dataclass(frozen=True)
class ExpertTiles:
    """From a tile's number to its record, in one warp; 32 experts are looked up at a time."""

    offsets: cute.Tensor
    order: cute.Tensor  # experts in the order of their tiles; read only if `ordered`
    ordered: bool
    band: int  # width of the raster's bands, in tiles (see `raster`)
    experts: Int32
    row_tiles: Int32
    column_tiles: Int32  # tiles of an expert across; `row_tiles` is their number down

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
            first, expert, begin, end: the window that the last call returned.

        Returns:
            The window moved to where the tile is, then the expert's first row and the row after its
            last, position (see `unpack`) and expert, -1 if there is no such tile.
        """
        number = tile // self.each
        page = number - number % _WARP
        # Claims only grow, so a page of 32 experts is read once.
        if number < self.experts and page != first:
            first = page
            expert, begin, end = self.window(first)
        lane = number % _WARP
        row = cute.arch.shuffle_sync(begin, lane)
        stop = cute.arch.shuffle_sync(end, lane)
        at_tile = cute.arch.shuffle_sync(expert, lane)
        # Offsets are not read there; the shuffles above take what the window had.
        if number >= self.experts:
            at_tile = Int32(-1)
        down, across = raster(
            tile - number * self.each, self.row_tiles, self.column_tiles, self.band, cutlass.min
        )
        return first, expert, begin, end, row, stop, down << _ROW_SHIFT | across, at_tile
