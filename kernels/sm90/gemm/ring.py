"""Pipeline of stages between loading and multiplying warps: a ring, with two barriers a stage.

CuTe's PipelineTmaAsync with one addition: threads that copy with cp.async arrive as well. A
barrier's phase ends with as many arrivals as it was initialised for:

    full[stage]   1, of the warp that issues TMA, which also says how many bytes to wait for,
                  + copiers, one of each thread whose cp.async have reached shared memory
    empty[stage]  readers, one of each multiplying warp that has read the stage
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32

from phalanx.kernels.sm90.gemm.tensors import array, struct

type State = Any  # a `cutlass.pipeline.PipelineState`, which has no types


@dataclass(frozen=True)
class Ring:
    """View of the barriers in each thread; `init_barriers` comes before the first use."""

    storage: Any
    stages: int
    bytes: int  # bytes that TMA brings to a stage
    copiers: int  # threads that copy to a stage with cp.async, besides TMA
    readers: int  # warps that multiply a stage

    @staticmethod
    def fields(stages: int) -> Any:
        return struct(full=array(cutlass.Int64, stages), empty=array(cutlass.Int64, stages))

    def init_barriers(self) -> None:
        """One warp: initialise the barriers; a fence and a barrier of the CTA follow."""
        full, empty = self.storage.full.data_ptr(), self.storage.empty.data_ptr()
        with cute.arch.elect_one():
            for stage in range(self.stages):
                # 1: arrive_and_expect_tx of the TMA warp. cp.async arrives per thread, not per
                # warp, as each thread's copies complete by themselves.
                cute.arch.mbarrier_init(full + stage, 1 + self.copiers)
                cute.arch.mbarrier_init(empty + stage, self.readers)

    def producer_state(self) -> State:
        return pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)

    def full_barrier(self, state: State) -> cute.Pointer:
        return self.storage.full.data_ptr() + state.index

    def producer_acquire(self, state: State) -> None:
        # A producer state starts in phase 1: the first round over the stages does not wait.
        cute.arch.mbarrier_wait(self.storage.empty.data_ptr() + state.index, state.phase)

    def producer_arrive_and_expect_tx(self, state: State) -> None:
        """One warp, before its TMA copies: arrive, and add their bytes to the phase. Both are one
        operation: between them the phase could end without the bytes."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full_barrier(state), self.bytes)

    def earlier_full_barrier(self, state: State, blocks: int) -> cute.Pointer:
        """Full barrier of the stage `blocks` (fewer than there are stages) before `state`."""
        stage = (state.index + (self.stages - blocks)) % self.stages
        return self.storage.full.data_ptr() + stage

    def position(self, number: Int32) -> tuple[Int32, Int32]:
        """Stage of block `number`, counted over all tiles, and its full barrier's phase."""
        return number % self.stages, number // self.stages % 2

    def next_position(self, stage: Int32, phase: Int32) -> tuple[Int32, Int32]:
        last = stage == self.stages - 1
        next_stage = cutlass.select_(last, Int32(0), stage + 1)
        return next_stage, cutlass.select_(last, phase ^ 1, phase)

    def consumer_try_wait(self, stage: Int32, phase: Int32) -> cutlass.Boolean:
        return cute.arch.mbarrier_try_wait(self.storage.full.data_ptr() + stage, phase)

    def consumer_wait(self, stage: Int32, phase: Int32) -> None:
        cute.arch.mbarrier_wait(self.storage.full.data_ptr() + stage, phase)

    def consumer_wait_block(self, number: Int32) -> Int32:
        """Wait until the stage of block `number` (see `position`) is full; returns the stage."""
        stage, phase = self.position(number)
        self.consumer_wait(stage, phase)
        return stage

    @cute.jit
    def consumer_release(self, stage: Int32) -> None:
        # One arrival a warp rather than a thread: 8 atomics on the barrier in place of 256. The
        # wait for wgmma before it covers all lanes.
        lane = Int32(cute.arch.lane_idx())
        empty = self.storage.empty.data_ptr() + stage
        if lane < 1:
            cute.arch.mbarrier_arrive(empty)
