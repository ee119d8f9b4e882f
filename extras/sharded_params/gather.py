"""Gathering of what is not sharded, by Megatron-Core, and of rings, from step to step."""

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel

from phalanx.extras.sharded_params.ring import PLACES, Ring
from phalanx.parallel.megatron.param_gather import ParamGather


class ShardedGather(ParamGather):
    """Where the last step, or a graph that the host takes no note of, has left the rings."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], rings: Sequence[Ring]) -> None:
        super().__init__(chunks)
        self._rings = rings

    def begin(self) -> None:
        super().begin()
        for ring in self._rings:
            for number in range(PLACES):
                ring.fetch(number)

    def end(self) -> None:
        super().end()
        for ring in self._rings:
            ring.finish()

    def invalidate(self) -> None:
        super().invalidate()
        for ring in self._rings:
            ring.forget()

    def abandon(self) -> None:
        for ring in self._rings:
            ring.abandon()
        super().abandon()
