"""The order of fc1's output channels in memory: canonical, or that of cuDNN's fused kernels.

A gated fc1 has F gate and F up channels. Checkpoints, conversions and every other backend store
them one after the other, [gate; up]. The fused kernels read a gate channel and its up channel from
one tile, so they alternate runs of 32 of each. `Interleaved` alone knows this order; weights stored
in it, with their gradients and optimizer states, are converted here.

Legend: L experts, F expert width, H = 2F, B = F / 32 runs of gate and of up channels.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from phalanx.kernels.expert_mlp.mlp_spec import Run

RUN = 32  # gate or up channels that are contiguous in memory


@dataclass(frozen=True)
class Interleaved:
    """[gate; up] <-> alternating runs of 32, along one dimension of H = 2F channels."""

    run: int = RUN

    def store(self, canonical: Tensor, dim: int) -> Tensor:
        """A contiguous copy in the order of the kernels."""
        runs = canonical.unflatten(dim, (2, -1, self.run))
        return runs.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()

    def canonical(self, stored: Tensor, dim: int) -> Tensor:
        """The inverse of `store`."""
        runs = stored.unflatten(dim, (-1, 2, self.run))
        return runs.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()

    def runs(self, channels: int) -> Iterator[Run]:
        for block in range(channels // (2 * self.run)):
            for half in range(2):
                first = block * self.run
                yield Run(2 * first + half * self.run, half * channels // 2 + first)
