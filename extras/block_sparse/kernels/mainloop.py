"""Loading side of a main loop over the blocks of a list, in place of all of a contraction.

The tile is one of `kernels.sm90.gemm.mainloop`, the stages and their barriers too. What differs is
which stages a tile has: the two stages of 64 channels of each living block of 128.

Legend as in `lists`.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from phalanx.extras.block_sparse.kernels.lists import BLOCK
from phalanx.kernels.sm90.gemm.mainloop import DEPTH, Producer

STAGES = BLOCK // DEPTH  # of a block
LANES = 32


class SparseProducer(Producer):
    """Loading side: `pick` once a tile, whose result goes with the sources of its rows."""

    def __init__(self, *args: Any, blocks: cute.Tensor) -> None:
        super().__init__(*args)
        self.blocks = blocks  # [L, tiles, MOST]

    def pick(self, column: Int32, expert: Int32) -> tuple[Int32, Int32]:
        """Entries lane and lane + 32 of a tile's list: a read of memory, once a tile."""
        lane = cute.arch.lane_idx()
        return self.blocks[expert, column, lane], self.blocks[expert, column, lane + LANES]

    def block(self, i: Int32, sources: tuple[Any, ...]) -> Int32:
        """Stage i of those that the list has; `sources` end with the result of `pick`."""
        place = i // STAGES
        low, high = (cute.arch.shuffle_sync(each, place % LANES) for each in sources[-2:])
        return cutlass.select_(place < LANES, low, high) * STAGES + i % STAGES
