"""Gathering of what is not sharded, by Megatron-Core, and of rings, from step to step.

The host notes which layers are in a ring, and replays of a graph note nothing. So each pass of a
step or validation begins without notes.
"""

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel

from phalanx.extras.sharded_params.ring import PLACES, Ring
from phalanx.parallel.megatron.param_gather import ParamGather


class ShardedGather(ParamGather):
    """Gathering of chunks, some of whose parameters are in rings."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], rings: Sequence[Ring]) -> None:
        super().__init__(chunks)
        self._rings = rings

    def begin(self) -> None:
        super().begin()
        for ring in self._rings:
            ring.begin()
            for number in range(PLACES):
                ring.fetch(number)

    def end(self) -> None:
        super().end()
        for ring in self._rings:
            ring.finish()

    def abandon(self) -> None:
        for ring in self._rings:
            ring.abandon()
        super().abandon()
