"""The rail between nodes: an exchange of blocks of equal size, and its engine of collectives.

A rail connects the ranks with the same local rank on the M nodes of a group. Blocks are static, so
that no host needs a count, and a CUDA graph can capture the exchange.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.dispatcher.passes.paced import paced, swapped
from phalanx.parallel.dispatcher.passes.pass_groups import Ranks, start_collective


class RowCounts(NamedTuple):
    """Rows of each block that hold data: the first ones."""

    sent_M: Tensor
    """int32 [M] on the device, of the blocks to each node; more than C means C."""
    arriving_M: Tensor
    """int32 [M] on the device, of the blocks from each node."""

    @property
    def back(self) -> "RowCounts":
        """Counts of the same blocks on their way back."""
        return RowCounts(self.arriving_M, self.sent_M)


class Started(NamedTuple):
    """An exchange that has started."""

    received: Tensor
    """Rows that arrive, [M * C, ...] with block m from node m, after `wait`."""
    sent: Tensor
    """Rows that are being sent, referenced until then."""
    wait: Callable[[], None]
    """Function that lets the current stream wait for the exchange."""


class Rail(Protocol):
    """Exchange of blocks between the ranks of a rail."""

    counts: bool
    """True if `swap` sends less with counts."""

    def start(self, blocks: Tensor, counts: RowCounts | None = None) -> Started:
        """Start to send block m of M to node m: [M * C, ...].

        Collective over the rail. Rows beyond `counts` may hold anything; None: all rows hold data.
        """
        ...


def swap(rail: Rail, blocks: Tensor, counts: RowCounts | None = None) -> Tensor:
    """`Rail.start`, for which the current stream waits: [M * C, ...], with block m from node m."""
    started = rail.start(blocks, counts)
    started.wait()
    return started.received


class CollectiveRail:
    """A rail of one even all-to-all of gloo or NCCL.

    Args:
        ranks: those of the rail, in the order of nodes; or groups of them for both passes.
    """

    counts = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def start(self, blocks: Tensor, counts: RowCounts | None = None) -> Started:
        """`Rail.start`."""
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)

        def exchange(group: dist.ProcessGroup) -> None:
            with paced(group, blocks, swapped):
                dist.all_to_all_single(received, blocks, group=group)

        return Started(received, blocks, start_collective(self._ranks, blocks, exchange))
