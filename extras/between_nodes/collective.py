"""The rail between nodes: an exchange of blocks of equal size by a collective.

A rail connects the ranks with the same local rank on the M nodes of a group. Blocks are static, so
that no host needs a count, and a CUDA graph can capture the exchange.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.dispatcher.collectives import Collectives


class Started(NamedTuple):
    """An exchange that has started."""

    received: Tensor  # rows that arrive, [M * C, ...] with block m from node m, after `wait`
    sent: Tensor  # rows that are being sent, referenced until then
    wait: Callable[[], None]  # function that lets the current stream wait for the exchange


class Rail(Protocol):
    """Exchange of blocks between the ranks of a rail."""

    def start(self, blocks: Tensor) -> Started:
        """Start to send block m of M to node m: [M * C, ...]. Collective over the rail."""
        ...


def swap(rail: Rail, blocks: Tensor) -> Tensor:
    """`Rail.start`, for which the current stream waits: [M * C, ...], with block m from node m."""
    started = rail.start(blocks)
    started.wait()
    return started.received


class CollectiveRail:
    """A rail of one even all-to-all of gloo or NCCL.

    Args:
        ranks: collectives of the rail's ranks, in the order of nodes.
    """

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def start(self, blocks: Tensor) -> Started:
        """`Rail.start`."""
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)

        def exchange(group: dist.ProcessGroup) -> None:
            dist.all_to_all_single(received, blocks, group=group)

        return Started(received, blocks, self._ranks.start(blocks, exchange))
