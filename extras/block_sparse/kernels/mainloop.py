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
from phalanx.kernels.sm90.gemm.ring import State

STAGES = BLOCK // DEPTH  # of a block
LANES = 32


class SparseProducer(Producer):
    """Loading side: `pick` once a tile, then a call for each half of its stages."""

    def __init__(self, *args: Any, blocks: cute.Tensor) -> None:
        super().__init__(*args)
        self.blocks = blocks  # [L, tiles, MOST]

    def pick(self, column: Int32, expert: Int32) -> tuple[Int32, Int32]:
        """Entries lane and lane + 32 of a tile's list: a read of memory, once a tile."""
        lane = cute.arch.lane_idx()
        return self.blocks[expert, column, lane], self.blocks[expert, column, lane + LANES]

    @cute.jit
    def __call__(  # type: ignore[override]  # `picked`, and stages of the list
        self,
        state: State,
        sources: tuple[Any, ...],
        picked: tuple[Int32, Int32],
        row: Int32,
        column: Int32,
        expert: Int32,
        half_offset: Int32,
        begin: Int32,
        end: Int32,
    ) -> State:
        """Load stages begin .. end - 1 of those that the list has; others as in `Producer`."""
        to_a, from_a = self._a(row)
        boxes = self._boxes(column, expert, half_offset)
        for i in cutlass.range(begin, end, unroll=1):
            place = i // STAGES
            low = cute.arch.shuffle_sync(picked[0], place % LANES)
            high = cute.arch.shuffle_sync(picked[1], place % LANES)
            k = cutlass.select_(place < LANES, low, high) * STAGES + i % STAGES
            # As in `Producer`: every loading warp waits for itself.
            self.ring.producer_acquire(state)
            if self.leads:
                self.ring.producer_arrive_and_expect_tx(state)
                self._send_b(boxes, k, state)
                if cutlass.const_expr(not self.loop.gather):
                    cute.copy(
                        self.atom_a,
                        from_a[(None, *self.place(k))],
                        to_a[(None, state.index)],
                        tma_bar_ptr=self.ring.full_barrier(state),
                    )
            if cutlass.const_expr(self.loop.gather):
                self.copy_rows(state, sources, k)
            state.advance()
        return state
