"""Tile scheduler: persistent CTAs claim tiles of all experts from a counter on the GPU.

All tiles are claimed with an atomic add, the first of a CTA too: one that starts late, because
another kernel still has its SM, or shares it, takes fewer. The first warp of a CTA claims one tile
ahead, looks its expert up in the device's offsets and sends a record to the other warps through
shared memory. A tile belongs to one CTA and one expert, and results do not depend on who computed
it.

Every CTA makes one claim past the last tile; the last of these sets the counter back to 0, so a
counter is zeroed once, not once a launch.

Records go through `SLOTS` slots with two barriers each: full[slot] takes 1 arrival, of the first
warp when the record is written; empty[slot] one of each warp that reads records.

Where all experts have the same number of tiles, as in weight gradients, tiles are numbered expert
by expert, in the caller's order, and looked up by division (`ExpertTiles`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from phalanx.kernels.sm90.exchange.waves import slice_tiles
from phalanx.kernels.sm90.gemm.tensors import array, struct

SLOTS = 2  # records in flight: that of the current tile and of the next one
RECORD_INTS = 4
"""First row, row after the expert's last one, column tile, expert (-1: no tiles left); if sliced,
the expert << `Scheduler.slice_bits` and its slice in place of the expert."""
_WARP = 32


def raster(index: Any, row_tiles: Any, column_tiles: Any, band: int, smaller: Callable) -> tuple:
    """Row and column of a tile inside an expert, so that neighbours share operands in L2.

    Bands of `band` columns are walked row by row, every other band upwards. Integers of Python and
    of the device both work; `smaller` is the minimum of two. `index` counts the tiles of the
    expert's grid.
    """
    number = index // (row_tiles * band)
    inside = index - number * (row_tiles * band)
    width = smaller(column_tiles - number * band, band)
    row = inside // width
    column = number * band + inside - row * width
    return row + (number % 2) * (row_tiles - 1 - 2 * row), column


@dataclass(frozen=True)
class Schedule:
    """Compiled-in choices of the scheduler."""

    tile_rows: int  # rows of a tile
    readers: int  # warps of a CTA that read records: those that load and those that multiply
    band: int = 8
    sliced: bool = False  # an expert's tiles come in slices of its rows, which records contain

    def storage(self) -> Any:
        return struct(
            full=array(cutlass.Int64, SLOTS),
            empty=array(cutlass.Int64, SLOTS),
            records=array(cutlass.Int32, SLOTS * RECORD_INTS, 4 * RECORD_INTS),
        )


@dataclass(frozen=True)
class Scheduler:
    """Device side, in every thread; `init_barriers` comes before the first use."""

    config: Schedule
    storage: Any
    offsets: cute.Tensor
    counter: cute.Tensor
    experts: Int32
    column_tiles: Int32
    slice_bits: Any = None  # log2 of the slices that an expert's rows are taken in, if any

    def init_barriers(self) -> None:
        """Initialise the barriers; a fence and a barrier of the CTA follow."""
        full, empty = self.storage.full.data_ptr(), self.storage.empty.data_ptr()
        with cute.arch.elect_one():
            for slot in range(SLOTS):
                cute.arch.mbarrier_init(full + slot, 1)
                cute.arch.mbarrier_init(empty + slot, self.config.readers)

    @cute.jit
    def read(self, number: Int32) -> tuple[Int32, ...]:
        """Wait for the record of the CTA's tile `number` (0, 1, ...), and release its slot."""
        # Phase of the slot's barrier: it flips with every second record, as there are two slots.
        slot = number & (SLOTS - 1)
        cute.arch.mbarrier_wait(self.storage.full.data_ptr() + slot, (number >> 1) & 1)
        record = cute.make_tensor(self._record(slot), cute.make_layout(RECORD_INTS))
        row, end, column, expert = record[0], record[1], record[2], record[3]
        cute.arch.sync_warp()  # all lanes have read the record before one of them arrives
        with cute.arch.elect_one():
            # CTA scope: a record was read, there is nothing to publish. A release at cluster scope
            # becomes MEMBAR.ALL.GPU, which waits for all stores of the warp.
            cute.arch.mbarrier_arrive(self.storage.empty.data_ptr() + slot)
        return row, end, column, expert

    @cute.jit
    def send(self, number: Int32, row: Int32, end: Int32, column: Int32, expert: Int32) -> None:
        slot = number % SLOTS
        cute.arch.mbarrier_wait(self.storage.empty.data_ptr() + slot, (number // SLOTS) % 2 ^ 1)
        record = cute.make_tensor(self._record(slot), cute.make_layout(RECORD_INTS))
        with cute.arch.elect_one():
            record[0], record[1], record[2], record[3] = row, end, column, expert
            # CTA scope: a wider release would hold up this warp and the readers, who are to
            # multiply.
            cute.arch.mbarrier_arrive(self.storage.full.data_ptr() + slot)
        cute.arch.sync_warp()

    @cute.jit
    def claim(self) -> Int32:
        """First warp: claim a tile, whose number arrives in lane 0, for `claimed_tile`."""
        # relaxed: the counter orders nothing but itself.
        claimed = Int32(0)
        if cute.arch.lane_idx() == 0:
            claimed = cute.arch.atomic_add(
                self.counter.iterator, Int32(1), sem="relaxed", scope="gpu"
            )
        return claimed

    @cute.jit
    def first(self) -> Int32:
        return self.claimed_tile(self.claim())

    @cute.jit
    def claimed_tile(self, claimed: Int32) -> Int32:
        return cute.arch.shuffle_sync(claimed, 0)

    @cute.jit
    def window(self, first: Int32) -> tuple[Int32, ...]:
        """Experts first .. first + 31, one a lane: first row, end, and tiles up to its end."""
        lane = cute.arch.lane_idx()
        begin = self.offsets[cutlass.min(first + lane, self.experts)]
        end = self.offsets[cutlass.min(first + lane + 1, self.experts)]
        inclusive = self._row_tiles(begin, end) * self.column_tiles
        # Sums over the lanes below, in five steps: a search over 32 experts is then a vote.
        for step in cutlass.range_constexpr(5):
            below = cute.arch.shuffle_sync_up(inclusive, 1 << step)
            inclusive = cutlass.select_(lane >= 1 << step, inclusive + below, inclusive)
        return begin, end, inclusive

    @cute.jit
    def locate(
        self, tile: Int32, first: Int32, before: Int32, begin: Int32, end: Int32, inclusive: Int32
    ) -> tuple[Int32, ...]:
        """The record of a tile. Tiles must not decrease from call to call.

        Args:
            tile: number over all experts.
            first, before, begin, end, inclusive: the result of `window(first)`, and the number of
                tiles before it.

        Returns:
            The window of the tile, then row, end, column and expert of the tile, then the number of
                tiles up to the end of the window: if there is no such tile (expert -1), of all.
        """
        total = cute.arch.shuffle_sync(inclusive, _WARP - 1)
        while tile - before >= total and first + _WARP < self.experts:
            before += total
            first += _WARP
            begin, end, inclusive = self.window(first)
            total = cute.arch.shuffle_sync(inclusive, _WARP - 1)
        inside = tile - before
        # Experts that end at or before the tile, those without rows among them: the next one has
        # it.
        ahead = cute.arch.popc(cute.arch.vote_ballot_sync(inclusive <= inside))
        source = cutlass.min(ahead, _WARP - 1)
        row = cute.arch.shuffle_sync(begin, source)
        stop = cute.arch.shuffle_sync(end, source)
        last = cute.arch.shuffle_sync(inclusive, source)
        column, expert = Int32(0), Int32(-1)
        if inside < total:
            row_tiles = self._row_tiles(row, stop)
            index = inside - (last - row_tiles * self.column_tiles)
            if cutlass.const_expr(self.config.sliced):
                # Tiles are numbered slice by slice, all columns of one before the next: rows of a
                # slice are complete, and can be sent, while the expert's others are computed.
                height = slice_tiles(row_tiles, self.slice_bits)
                number = index // (height * self.column_tiles)
                index -= number * height * self.column_tiles
                row += number * height * self.config.tile_rows
                row_tiles = cutlass.min(row_tiles - number * height, height)
            row_tile, column = raster(
                index, row_tiles, self.column_tiles, self.config.band, cutlass.min
            )
            row += row_tile * self.config.tile_rows
            expert = first + source
            if cutlass.const_expr(self.config.sliced):
                expert = (expert << self.slice_bits) + number
        return first, before, begin, end, inclusive, row, stop, column, expert, before + total

    @cute.jit
    def finish(self, tile: Int32, ctas: Int32, tiles: Int32) -> None:
        """First warp, after its claim past the last tile: the last such zeroes the counter."""
        # Claims are tiles + CTAs in all. A plain store is enough: nobody claims after this one,
        # and the next launch of the stream sees it.
        if tile == tiles + ctas - 1 and cute.arch.lane_idx() == 0:
            self.counter[0] = Int32(0)

    def _row_tiles(self, begin: Int32, end: Int32) -> Int32:
        return (end - begin + (self.config.tile_rows - 1)) // self.config.tile_rows

    def _record(self, slot: Int32) -> cute.Pointer:
        # Aligned to a record, which is then read and written in one access.
        return (self.storage.records.data_ptr() + slot * RECORD_INTS).align(4 * RECORD_INTS)


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
        """The record of a tile, from its number over all experts and the window that the last call
        returned. Returns the window moved to where the tile is, then the expert's first row and the
        row after its last, position (see `unpack`) and expert, -1 if there is no such tile."""
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
