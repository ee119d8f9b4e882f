"""The stages between loading and multiplying warps: a ring of buffers with two barriers each.

A stage is full when all its bytes have arrived, and empty when the warps that multiply it, of every
CTA that shares it, have released it. A barrier's phase ends with as many arrivals as it was made
for:

    full[stage]   1, of the warp that issues TMA, which also says how many bytes to wait for,
                  + copiers, one of each thread whose cp.async have reached shared memory
    empty[stage]  readers * cluster, one of each multiplying warp that has read the stage
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from phalanx.kernels.sm90.gemm.storage import array, struct

type State = Any
"""A `cutlass.pipeline.PipelineState`, which has no types."""


@dataclass(frozen=True)
class Ring:
    """Made by every thread over the same storage; `start` belongs before the first use."""

    storage: Any
    stages: int
    bytes: int
    """Bytes that TMA brings to a stage of one CTA."""
    copiers: int
    """Threads that copy to a stage with cp.async, besides TMA."""
    readers: int
    """Warps of a CTA that multiply a stage."""
    cluster: int
    """CTAs that share what is loaded."""

    @staticmethod
    def fields(stages: int) -> Any:
        """The part of a kernel's shared memory that a ring needs."""
        return struct(full=array(cutlass.Int64, stages), empty=array(cutlass.Int64, stages))

    def init_barriers(self) -> None:
        """One warp: initialise the barriers; to be followed by a fence and a barrier."""
        full, empty = self.storage.full.data_ptr(), self.storage.empty.data_ptr()
        with cute.arch.elect_one():
            for stage in range(self.stages):
                cute.arch.mbarrier_init(full + stage, 1 + self.copiers)
                cute.arch.mbarrier_init(empty + stage, self.readers * self.cluster)

    def producer_state(self) -> State:
        """The position of a warp that loads."""
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def full_barrier(self, state: State) -> cute.Pointer:
        """The stage's full barrier."""
        return self.storage.full.data_ptr() + state.index

    def producer_acquire(self, state: State) -> None:
        """Wait until the stage may be overwritten."""
        cute.arch.mbarrier_wait(self.storage.empty.data_ptr() + state.index, state.phase)

    def producer_arrive_and_expect_tx(self, state: State) -> None:
        """One warp, before its TMA copies: say how many bytes will come."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full_barrier(state), self.bytes)

    def earlier_full_barrier(self, state: State, blocks: int) -> cute.Pointer:
        """The full barrier of the stage so many blocks before `state`, fewer than there are."""
        stage = (state.index + (self.stages - blocks)) % self.stages
        return self.storage.full.data_ptr() + stage

    def position(self, number: Int32) -> tuple[Int32, Int32]:
        """Stage of block `number`, of all of a CTA, and the phase of its full barrier."""
        return number % self.stages, number // self.stages % 2

    def next_position(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        """`place` of the next block."""
        last = stage == self.stages - 1
        next_stage = cutlass.select_(last, Int32(0), stage + 1)
        return next_stage, cutlass.select_(last, phase ^ 1, phase)

    def consumer_try_wait(self, stage: Int32, phase: Int32) -> cutlass.Boolean:
        """Whether a stage is full; does not wait for it."""
        return cute.arch.mbarrier_try_wait(self.storage.full.data_ptr() + stage, phase)

    def consumer_wait(self, stage: Int32, phase: Int32) -> None:
        """Wait until a stage is full."""
        cute.arch.mbarrier_wait(self.storage.full.data_ptr() + stage, phase)

    def consumer_wait_block(self, number: Int32) -> Int32:
        """Wait until the stage of block `number`, of all of a CTA, is full; returns the stage."""
        stage, phase = self.position(number)
        self.consumer_wait(stage, phase)
        return stage

    @cute.jit
    def consumer_release(self, stage: Int32) -> None:
        """A multiplying warp, all its lanes, has read a stage."""
        lane = Int32(cute.arch.lane_idx())
        empty = self.storage.empty.data_ptr() + stage
        if lane < self.cluster:
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.mbarrier_arrive(empty, lane)
            else:
                cute.arch.mbarrier_arrive(empty)
