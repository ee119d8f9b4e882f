"""How a grouped GEMM tells another kernel, while it runs, which waves of experts it has finished.

Where a rank has few experts, waves are made of slices of their rows. Every multiplying warp counts
a tile for its wave (`waves.last_wave_of`): where groups take turns, when its stores have been
written, as it would wait for its turn anyway; else when it comes to its next tile, by when they
have long been. The reader, `combine_push`, computes how many counts make a wave.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.sm90.exchange.waves import MAX_WAVES, last_wave_of
from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, TILE_ROWS, Mainloop

CLAIMED, THROUGH, TILES, COUNTS = 0, 1, 2, 3
PROGRESS = COUNTS + MAX_WAVES
"""int32 of a rank, 0 between exchanges: chunks of rows that were claimed and CTAs that are through
(`combine_push`), the scheduler's tiles, and counts of each wave."""
_WARPS = GROUP_THREADS // 32


class Made(NamedTuple):
    """Expert rows, and how their reader sees which waves of them are there: by default all are."""

    rows_SD: Tensor
    progress: Tensor
    """int32 [PROGRESS]."""
    waves: int = 1
    tile_rows: int = 1
    counts: int = 0
    """Of `tile_rows` rows of an expert."""
    bits: int = 0
    """An expert's rows are taken in `1 << bits` slices."""


class Told(NamedTuple):
    """What `rows` is given to tell."""

    out_SN: Tensor
    """Where it writes."""
    progress: Tensor
    """int32 [PROGRESS]."""
    waves: int
    loop: Mainloop
    """Its tile, on which the number of counts depends."""
    sms: int
    """SMs of the reader, to which it gives way."""
    share: float
    """Of the experts, after which it does."""
    bits: int = 0
    """An expert's rows are taken in `1 << bits` slices."""

    def giving(self, experts: int) -> tuple[int, int, int, int]:
        """Waves, clusters that give way, the slice from which on they do, and `bits`."""
        late = int(self.share * (experts << self.bits))
        return self.waves, -(-self.sms // self.loop.cluster), late, self.bits

    @property
    def made(self) -> Made:
        """For the reader."""
        groups = 1 if self.loop.pingpong else 2
        column_tiles = -(-self.out_SN.shape[1] // self.loop.columns)
        counts = self.loop.cluster * groups * _WARPS * column_tiles
        tile_rows = self.loop.cluster * TILE_ROWS
        return Made(self.out_SN, self.progress, self.waves, tile_rows, counts, self.bits)


class Tell:
    """Device side, for a warp. `turn`, kept until a tile is told of, is 1 more than its wave."""

    def __init__(self, progress: cute.Pointer, experts: Int32, waves: Int32, bits: Int32) -> None:
        self.progress, self.experts, self.waves, self.bits = progress, experts, waves, bits

    @cute.jit
    def __call__(self, turn: Int32) -> None:
        """Tell of a tile, if there was one."""
        if turn > 0:
            cute.arch.cp_async_bulk_wait_group(0, read=False)
            cute.arch.fence_proxy("async.global")
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                count: Any = self.progress + (COUNTS - 1 + turn)
                cute.arch.atomic_add(count, Int32(1), sem="relaxed", scope="gpu")

    @cute.jit
    def after(self, sliced: Int32) -> Int32:
        """The next `turn`, of an expert's slice as records name it."""
        return last_wave_of(sliced, self.experts << self.bits, self.waves) + 1
