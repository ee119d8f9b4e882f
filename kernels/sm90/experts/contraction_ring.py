"""Stages of the product of a weight gradient in bf16: their boxes and barriers."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from phalanx.kernels.sm90.gemm.mainloop import GROUP_THREADS, MMA_GROUPS
from phalanx.kernels.sm90.gemm.ring import State

MMA_WARPS = 4 * MMA_GROUPS
BOX = 64  # columns of a box, and rows of a stage
BOX_BYTES = 2 * BOX * BOX
D, V = 0, 1  # the two operands


def blocks_of(rows: Int32) -> Int32:
    """Number of stages that hold `rows` rows."""
    return (rows + (BOX - 1)) // BOX


@dataclass(frozen=True)
class ContractionRing:
    """The four barriers of each stage, as seen by every thread; `init_barriers` comes first.

    A phase ends with so many arrivals:

        full            1, of the TMA warp with its bytes, or of the warp that cleared the stage;
                        + 128 with a gathered operand, one of each thread whose cp.async landed
        empty           8, of the multiplying warps
        tma_done        1, of the TMA warp with its bytes: in place of full, for stages to be
        cleared leader_started  1, of a thread of the first group
    """

    loop: Any  # the `contraction.Contraction`
    storage: Any

    @property
    def full(self) -> cute.Pointer:
        """The stage's rows have arrived, and rows past the expert's end are zero."""
        return self.storage.barriers.data_ptr()

    @property
    def empty(self) -> cute.Pointer:
        """Every multiplying warp has read the stage."""
        return self.full + self.loop.stages

    @property
    def tma_done(self) -> cute.Pointer:
        """TMA has filled a stage in which rows after an expert's last one have to be cleared."""
        return self.full + 2 * self.loop.stages

    @property
    def leader_started(self) -> cute.Pointer:
        """The first group has issued the stage's wgmma: only the skew depends on it."""
        return self.full + 3 * self.loop.stages

    def init_barriers(self) -> None:
        """One warp: initialise the barriers; a fence and a barrier of the CTA follow."""
        # cp.async arrives once a thread: each thread's copies complete by themselves.
        fillers = 1 if self.loop.gathered is None else 1 + GROUP_THREADS
        with cute.arch.elect_one():
            for stage in range(self.loop.stages):
                cute.arch.mbarrier_init(self.full + stage, fillers)
                cute.arch.mbarrier_init(self.empty + stage, MMA_WARPS)
                cute.arch.mbarrier_init(self.tma_done + stage, 1)
                cute.arch.mbarrier_init(self.leader_started + stage, 1)

    def producer_acquire(self, state: State) -> None:
        cute.arch.mbarrier_wait(self.empty + state.index, state.phase)

    def consumer_wait(self, state: State) -> None:
        cute.arch.mbarrier_wait(self.full + state.index, state.phase)

    def consumer_release(self, state: State) -> None:
        """A multiplying warp has read the stage."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + state.index)
