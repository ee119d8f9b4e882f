"""Progress of a grouped GEMM, signalled to another kernel as waves of experts are finished.

Where a rank has few experts, waves are made of slices of their rows. Every multiplying warp adds 1
to the count of a tile's wave (`waves.last_wave_of`): with ping-pong when the tile's stores are
complete, as it would wait for the other group anyway; otherwise when it comes to its next tile, by
when they have completed. The reader, `combine_push`, computes the count of a complete wave.

    multiplying warp    stores of a tile (TMA, or lanes) -> fence.proxy.async -> fence of GPU scope
                        -> sync_warp -> relaxed add to the wave's count
    reading lane        acquire the count until it is complete -> sync_warp -> loads of rows

Both kernels run on one GPU, hence the scope. The reader resets all counts at its end, for the next
exchange: its last launch follows the GEMM in the stream.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.sm90.exchange.peer_buffers import MAX_WAVES
from phalanx.kernels.sm90.exchange.waves import last_wave_of
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, TILE_ROWS, Mainloop

CLAIMED, FINISHED_CTAS, NEXT_TILE, COUNTS = 0, 1, 2, 3
PROGRESS = COUNTS + MAX_WAVES
"""int32 counters of a rank, 0 between exchanges: claimed chunks of rows and finished CTAs (both of
`combine_push`), the scheduler's counter of tiles, and the count of each wave."""
_WARPS = GROUP_THREADS // 32


class ReadyRows(NamedTuple):
    """Expert rows, and how their reader knows which waves of them are ready (default: all)."""

    rows_SD: Tensor
    progress: Tensor  # int32 [PROGRESS]
    waves: int = 1
    tile_rows: int = 1
    tile_counts: int = 0  # counts for `tile_rows` rows of an expert, over all columns
    slice_bits: int = 0  # log2 of the slices that an expert's rows are taken in


class TileSignal(NamedTuple):
    """Request that a launch of `grouped_gemm` signals its tiles, and yields SMs to their reader."""

    out_SN: Tensor  # output of the launch
    progress: Tensor  # int32 [PROGRESS]
    waves: int
    loop: Mainloop  # tile of the launch, on which the counts depend
    sms: int  # SMs of the reader: as many CTAs end early
    yield_after: float  # fraction of the experts after which they end
    slice_bits: int = 0  # log2 of the slices that an expert's rows are taken in

    def sizes(self, experts: int) -> tuple[int, int, int, int]:
        """Waves, CTAs that yield, the first slice at which they do, and `slice_bits`."""
        # In slices, since that is what the scheduler counts; rounded down, so that SMs come early.
        first_late = int(self.yield_after * (experts << self.slice_bits))
        return self.waves, self.sms, first_late, self.slice_bits

    @property
    def ready_rows(self) -> ReadyRows:
        """The rows as their reader takes them."""
        # With ping-pong a tile has one group of warps; otherwise both groups share each tile.
        groups = 1 if self.loop.pingpong else 2
        column_tiles = -(-self.out_SN.shape[1] // self.loop.columns)
        counts = groups * _WARPS * column_tiles
        progress = (self.waves, TILE_ROWS, counts, self.slice_bits)
        return ReadyRows(self.out_SN, self.progress, *progress)


def tile_sizes(signal: TileSignal | None, experts: int) -> dict[str, int]:
    """Integer arguments of a `grouped_gemm` launch, with or without a request, by name."""
    names = "waves", "yielding", "first_late", "slice_bits"
    sizes = (0, 0, experts, 0) if signal is None else signal.sizes(experts)
    return dict(zip(names, sizes, strict=True))


class Signaller:
    """Device side, for a warp. `pending` is 1 + the wave of a tile not yet signalled, or 0."""

    def __init__(
        self, progress: cute.Pointer, experts: Int32, waves: Int32, slice_bits: Int32
    ) -> None:
        self.progress, self.experts = progress, experts
        self.waves, self.slice_bits = waves, slice_bits

    @cute.jit
    def __call__(self, pending: Int32) -> None:
        """Signal a tile, if one is pending."""
        if pending > 0:
            # read=False: the bulk stores are complete, not only read from shared memory.
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            # TMA wrote through the async proxy; the count is an access of the generic one.
            cute.arch.fence_proxy("async.global")
            # Also rows that lanes stored themselves, each lane's before the warp's count.
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            # Relaxed, as the fence came before: the count itself only has to be atomic.
            if cute.arch.lane_idx() == 0:
                count: Any = self.progress + (COUNTS - 1 + pending)
                cute.arch.atomic_add(count, Int32(1), sem="relaxed", scope="gpu")

    @cute.jit
    def pending(self, sliced: Int32) -> Int32:
        """The next `pending`, for an expert's slice as in records."""
        return last_wave_of(sliced, self.experts << self.slice_bits, self.waves) + 1
