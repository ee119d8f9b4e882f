"""Shards that the other ranks of a host read, so that gathering them takes no SM.

NCCL copies with SMs: on an H200 some 12 GB/s with each, be they four or sixteen, so that what is
gathered takes a fixed time of SMs from the products beside it. Copy engines take none, which makes
a step 1.6 % shorter (docs/memory.md). They need no answer of the other side either: weights change
between `Ring.finish` and `Ring.begin` alone, where all ranks wait for one another.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.dispatcher.exchange import PeerMemory, reaches_peers
from phalanx.parallel.dispatcher.nodes import names_here
from phalanx.parallel.fault.agreement import gather


def reachable(group: Any) -> bool:
    """Whether the ranks of a group can read each other's memory. Collective over the job."""
    nccl, host = dist.get_backend(group) == "nccl", names_here(dist.get_rank())[0]
    answers = gather((host, nccl and reaches_peers()))
    return {answers[rank] for rank in dist.get_process_group_ranks(group)} == {(host, True)}


class Peers:
    """The ranks of a group, on one host."""

    def __init__(self, group: Any) -> None:
        self._group, self._rank, self._ranks = group, group.rank(), group.size()
        self._copies = torch.cuda.Stream()
        self._met = torch.zeros(1, device="cuda")
        self._mapped: list[PeerMemory] = []  # buffers of others are no owners of what they show

    def zeros(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        """A tensor [size] of each rank, this one's among them. Collective over the group."""
        memory = PeerMemory(self._group, size * dtype.itemsize)
        self._mapped.append(memory)
        shards = [memory.handle.get_buffer(r, (size,), dtype) for r in range(self._ranks)]
        shards[self._rank] = memory.memory.view(dtype)
        return shards

    def meet(self) -> None:
        """Have the current stream wait for those of all ranks."""
        dist.all_reduce(self._met, group=self._group)

    def pull(self, whole: Tensor, shards: Sequence[Tensor]) -> torch.cuda.Event:
        """Start to copy the ranks' shards of a unit to their places; the event follows the last."""
        self._copies.wait_stream(torch.cuda.current_stream())
        parts = whole.chunk(self._ranks)
        with torch.cuda.stream(self._copies):
            # Each rank begins with its own, and then reads another one than all others.
            for i in range(self._ranks):
                of = (self._rank + i) % self._ranks
                parts[of].copy_(shards[of], non_blocking=True)
            return self._copies.record_event()
