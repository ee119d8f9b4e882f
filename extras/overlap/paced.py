"""A slow network between pretended nodes of one host, to measure what hides exchanges.

PHALANX_WIRE=50e9,20e-6 with PHALANX_NODE_GPUS: bytes a second of each GPU to and from other nodes,
and seconds of latency. A collective then ends no earlier than its bytes would have crossed such a
wire. On a GPU a kernel of one CTA waits behind the collective, on its stream, and uses no other
SM; on a CPU the process sleeps.
"""

import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.dispatcher.nodes import names_here


class Wire(NamedTuple):
    """A network between nodes."""

    bandwidth: float  # bytes a second of a GPU, in each direction
    latency: float  # seconds

    def seconds(self, crossing: float) -> float:
        return self.latency + crossing / self.bandwidth


def wire() -> Wire | None:
    """The network of PHALANX_WIRE, if it is set; a ValueError unless it is two positive numbers."""
    text = os.environ.get("PHALANX_WIRE", "")
    return _parsed(text) if text else None


@functools.cache
def _parsed(text: str) -> Wire:
    try:
        bandwidth, latency = map(float, text.split(","))
    except ValueError:
        bandwidth = latency = 0.0
    if not (0 < bandwidth < float("inf") and 0 <= latency < 1):
        raise ValueError(
            f"PHALANX_WIRE={text} must be bytes a second and seconds of latency, "
            "as in PHALANX_WIRE=50e9,20e-6, or not set"
        )
    return Wire(bandwidth, latency)


def gathered(x: Tensor, ranks: int, node_ranks: int) -> float:
    """Bytes of `x` of a rank that cross to other nodes in an all-gather: once to each of them."""
    return x.nbytes * (ranks / node_ranks - 1)


def swapped(x: Tensor, ranks: int, node_ranks: int) -> float:
    """Bytes of `x` of a rank that cross to other nodes in an all-to-all of its equal blocks."""
    return x.nbytes * (1 - node_ranks / ranks)


@contextmanager
def paced(group: dist.ProcessGroup, x: Tensor, *, spreads: bool) -> Iterator[None]:
    """Inside, a collective of `x` on the current stream takes at least the time of the wire.

    With `spreads` all of it goes to every rank, not a block of it to each.
    """
    network, crossing = wire(), gathered if spreads else swapped
    crossed = 0.0 if network is None else crossing(x, group.size(), _node_ranks(group))
    if network is None or not crossed:
        yield
        return
    seconds = network.seconds(crossed)
    if not x.is_cuda:
        until = time.monotonic() + seconds
        yield
        time.sleep(max(0.0, until - time.monotonic()))
        return
    from phalanx.kernels.timer_triton import stamp, wait_after

    started = stamp(x.device)
    yield
    wait_after(started, seconds)


def _node_ranks(group: dist.ProcessGroup) -> int:
    ranks = dist.get_process_group_ranks(group)
    here = names_here(dist.get_rank())[1]
    return sum(names_here(rank)[1] == here for rank in ranks)
