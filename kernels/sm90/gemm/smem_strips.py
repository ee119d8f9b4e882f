"""From accumulators to rows in memory, warp by warp.

A warp owns 16 rows of a tile and a few strips of shared memory that no other warp touches: 16 rows
of 64 or 32 columns, swizzled. stmatrix and ldmatrix move fragments of wgmma in and out of them, TMA
moves them from and to memory. So an epilogue needs no barrier between warps, and its stores drain
while the warp goes on to the next tile. At the ragged end of an expert the lanes store just the
rows that exist, in 16-byte pieces: neither the next expert's rows nor padding is touched.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32
from cutlass.cute.nvgpu import cpasync

from phalanx.kernels.sm90.gemm.tensors import array, struct
from phalanx.kernels.sm90.jit import ptx

ROWS = 16
WARPS = 8


@dataclass(frozen=True)
class Strips:
    """`count` strips of shared memory for each multiplying warp."""

    columns: int  # columns of a strip: 64 or 32
    count: int

    @property
    def pitch(self) -> int:
        return 2 * self.columns

    @property
    def bytes(self) -> int:
        return WARPS * self.count * ROWS * self.pitch

    def storage(self) -> Any:
        # 1024: TMA swizzles by bits of the address, `_flip` by the row. They agree where the first
        # row of all strips starts the pattern.
        return struct(data=array(BFloat16, self.bytes // 2, 1024))

    def layout(self, count: int) -> cute.ComposedLayout:
        plain = cute.make_layout(
            (ROWS, self.columns, count), stride=(self.columns, 1, ROWS * self.columns)
        )
        # A row has 8 chunks of 16 bytes, or 4: as many bits are swizzled.
        bits = 3 if self.columns == 64 else 2
        return cute.make_composed_layout(cute.make_swizzle(bits, 4, 3), 0, plain)

    def to_memory(self, tensor: cute.Tensor) -> tuple[Any, Any]:
        return self._tma(cpasync.CopyBulkTensorTileS2GOp(), tensor)

    def from_memory(self, tensor: cute.Tensor) -> tuple[Any, Any]:
        return self._tma(cpasync.CopyBulkTensorTileG2SOp(), tensor)

    def _tma(self, op: Any, tensor: cute.Tensor) -> tuple[Any, Any]:
        one = cute.slice_(self.layout(1), (None, None, 0))
        atom = cpasync.make_tiled_tma_atom(op, tensor, one, (ROWS, self.columns))
        return atom[0], atom[1]


class Staging:
    """Device side: one warp's strips; `thread` counts from the first multiplying thread."""

    def __init__(self, strips: Strips, storage: Any, thread: Int32) -> None:
        self.strips = strips
        layout = strips.layout(WARPS * strips.count)
        self.tensor = storage.data.get_tensor(layout.outer, swizzle=layout.inner)
        self.first = cute.arch.make_warp_uniform(thread // 32) * strips.count
        base = ptx.address(storage.data.data_ptr()) + self.first * (ROWS * strips.pitch)
        # Shared address of the lane's row for stmatrix and ldmatrix.
        self.fragment = base + self._inside(thread % 32)

    def _inside(self, lane: Int32) -> Int32:
        row = lane % ROWS
        return row * self.strips.pitch + (lane // ROWS ^ self._flip(row)) * 16

    def _flip(self, row: Int32) -> Int32:
        """Swizzle: the XOR on the 16-byte chunks of a row, which TMA applies as well. Rows of 128
        bytes start on the same bank, rows of 64 on two in turn: so 8 rows take 8 chunks, or 2 x 4,
        and stmatrix has no bank conflicts."""
        return row % 8 if self.strips.columns == 64 else row // 2 % 4

    def write(self, strip: int, q: int, words: list[Uint32]) -> None:
        """Columns 16 q .. 16 q + 15 from fragments, four words a lane."""
        ptx.stmatrix(self._at(self.fragment, strip, q), *words)

    def read(self, strip: int, q: int) -> tuple[Uint32, ...]:
        return ptx.ldmatrix(self._at(self.fragment, strip, q))

    def _at(self, where: Int32, strip: int, q: int) -> Int32:
        # 16 columns are two chunks: in the address an XOR moves on by them, whatever the swizzle.
        return (where ^ (32 * q)) + strip * (ROWS * self.strips.pitch)

    def drain(self, pending: int) -> None:
        """Wait until all but the last `pending` stores have been read from shared memory."""
        # Bulk groups belong to a thread. Lane 0 alone may have issued TMA, hence the sync after it.
        cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def store(
        self,
        strip: cutlass.Constexpr,
        tma: tuple[Any, Any],
        rows: cute.Tensor,
        top: Int32,
        end: Int32,
        column: Int32,
    ) -> None:
        """Store what was written to rows top .. end - 1, from `column` on: one store of `drain`."""
        # Writes of stmatrix (generic proxy) become visible to TMA (async proxy); also needed before
        # a strip that lanes have stored is loaded to by TMA.
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        # TMA stores all 16 rows, and would overwrite those of the next expert.
        if end - top >= ROWS:
            smem, gmem = self._partition(strip, tma, top, column)
            cute.copy(tma[0], smem, gmem)
        else:
            self._store_rows(strip, rows, top, end, column)
        # An empty group if the lanes stored: `drain` counts stores without knowing how they were
        # made.
        cute.arch.cp_async_bulk_commit_group()

    def expect(self, strips: int, barrier: cute.Pointer) -> None:
        with cute.arch.elect_one():
            size = strips * ROWS * self.strips.pitch
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)

    def load(
        self,
        strip: int,
        tma: tuple[Any, Any],
        top: Int32,
        column: Int32,
        barrier: cute.Pointer,
    ) -> None:
        """Start to load 16 rows; rows and columns past the tensor's end are 0."""
        # Rows of the next expert are loaded too where this one ends: nothing is computed from them
        # that is stored.
        smem, gmem = self._partition(strip, tma, top, column)
        cute.copy(tma[0], gmem, smem, tma_bar_ptr=barrier)

    def _partition(self, strip: int, tma: Any, top: Int32, column: Int32) -> tuple[Any, Any]:
        # Coordinates of TMA: an expert's rows begin anywhere, not at multiples of a box.
        shifted = cute.domain_offset((top, column), tma[1])
        tile = cute.local_tile(shifted, (ROWS, self.strips.columns), (0, 0))
        smem, gmem = cpasync.tma_partition(
            tma[0],
            0,
            cute.make_layout(1),
            cute.group_modes(self.tensor, 0, 2),
            cute.group_modes(tile, 0, 2),
        )
        return smem[(None, self.first + strip)], gmem

    @cute.jit
    def _store_rows(
        self, strip: cutlass.Constexpr, rows: cute.Tensor, top: Int32, end: Int32, column: Int32
    ) -> None:
        pieces, lane = self.strips.pitch // 16, ptx.lane()
        row, piece = lane // pieces, lane % pieces
        # Recomputed from the lane: live over the multiplication it would cost a register.
        base = self.fragment - self._inside(lane)
        source = base + row * self.strips.pitch + (piece ^ self._flip(row)) * 16
        pitch = 2 * Int64(rows.shape[1])
        target = rows.iterator.toint() + Int64(top + row) * pitch + Int64(2 * (column + piece * 8))
        step = 512 // self.strips.pitch
        for p in cutlass.range_constexpr(ROWS // step):
            # 4 rows further the swizzle of 128-byte rows differs in bit 2 of the chunk (64 bytes).
            flip = 64 * (p % 2) if self.strips.columns == 64 else 0
            if top + row + step * p < end:
                words = ptx.load_shared(
                    (source ^ flip) + (strip * (ROWS * self.strips.pitch) + p * 512)
                )
                ptx.store_global(target + (step * p) * pitch, *words)
