"""The order of fc1's output channels in memory: canonical, or as cuDNN's fused kernels want it.

A gated fc1 has F gate channels and F of a linear half. Checkpoints, conversions and every other
backend have them one after the other, [gate; up]. The fused kernels read a gate and its partner
from one tile, so they want runs of 32 in turn: 32 of the gate, 32 of the linear half, the next 32
of the gate. `Interleaved` is the one place that knows that order; whoever stores weights in it
(their gradients and optimizer states lie in memory as they do) asks here for everything else.

Legend: L experts, F expert width, H = 2F, B = F / 32 runs of a half.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

RUN = 32
"""Channels of a half that lie together."""


class Run(NamedTuple):
    """Channels that lie together in both orders."""

    stored: int
    """First channel of the run in memory."""
    canonical: int
    """The same channel in [gate; up]."""


class Interleaved:
    """[gate; up] <-> runs of 32 in turn, along one dimension of H = 2F channels."""

    def store(self, canonical: Tensor, dim: int) -> Tensor:
        """A contiguous copy in the order of the kernels."""
        parted = canonical.unflatten(dim, (2, -1, RUN))
        return parted.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()

    def canonical(self, stored: Tensor, dim: int) -> Tensor:
        """The inverse of `store`."""
        parted = stored.unflatten(dim, (-1, 2, RUN))
        return parted.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()

    def runs(self, channels: int) -> Iterator[Run]:
        """Of H channels, in the order of memory."""
        for block in range(channels // (2 * RUN)):
            for half in range(2):
                yield Run((2 * block + half) * RUN, half * channels // 2 + block * RUN)
