"""Budget of rows: static buffers that are large enough, or a step that is rerun.

There are two capacities: of a rank's expert rows, and of the blocks of rows that `hier` sends
between nodes. A dispatcher asks for the size of its buffers and reports the need with `observe`;
the maximum stays on the device. Once per step, before the optimizer, the trainer reads `record`. If
that has `exceeded` the budget, it drops the gradients, calls `grow` and reruns the step: no token
is ever dropped.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

_HEADROOM = 1.1
ROW_MULTIPLE = 128  # divisor of the number of expert rows: they fill whole tiles
_BLOCK_SHARE = 0.48
"""Part of the excess of expert rows that blocks between nodes have: 1.24 x of 1.5 x.

With popularities of experts n ** -0.6 and EP64 of DeepSeek-V3 on 8 nodes, the fullest block has
1.223 x the balanced rows (docs/measured/kernels/rail_blocks.md, which a test computes).
"""


def block_factor(capacity_factor: float) -> float:
    """Rows of a block between nodes over the balanced load, for a capacity factor of experts.

    Nodes hold many experts, so that their loads differ less than those of ranks.
    """
    return 1 + _BLOCK_SHARE * (capacity_factor - 1)


def _factor_of_blocks(factor: float) -> float:
    return 1 + (factor - 1) / _BLOCK_SHARE


class Growth(NamedTuple):
    """An enlarged capacity, after a step that needed more rows than it had."""

    needed: float  # rows that were needed, over the balanced load
    factor: float  # rows of the rerun and of later steps, over the balanced load
    between_nodes: bool  # false for expert rows, True for blocks of rows between nodes

    def event(self, subject: str) -> str:
        if not self.between_nodes:
            need, rerun = "experts", f"capacity_factor {self.factor:.2f}"
        else:
            need, rerun = "blocks between nodes", f"{self.factor:.2f} x"
            rerun += f" (parallel.capacity_factor={_factor_of_blocks(self.factor):.2f} avoids it)"
        return (
            f"{need} needed {self.needed:.2f} x the balanced rows: "
            f"{subject} was run again with {rerun}"
        )


class Capacity:
    """Number of rows of static buffers, as a `factor` of the balanced load.

    `peak` is the largest ratio of needed to allocated rows of the last read.
    """

    def __init__(self, factor: float, device: torch.device) -> None:
        self.factor, self.peak = factor, 0.0
        self._granted = 0.0  # largest number of rows over the balanced load, after rounding up
        self._device = device
        self._most: dict[int, Tensor] = {}
        """Largest number that was needed, an int64 scalar per allocated number of rows."""

    def rows(self, balanced: float, *, most: int, multiple: int = 1) -> int:
        """Rows of a buffer for that balanced load: a multiple, and at most the worst case."""
        rows = min(most, math.ceil(self.factor * balanced / multiple) * multiple)
        self._granted = max(self._granted, rows / balanced)
        return rows

    def observe(self, needed: Tensor, rows: int) -> None:
        """Note on the device, in one kernel, that `rows` rows should be `needed` (int scalar)."""
        if rows not in self._most:
            self._most[rows] = torch.zeros((), dtype=torch.int64, device=self._device)
        torch.maximum(self._most[rows], needed, out=self._most[rows])

    def record(self) -> Tensor:
        """Largest ratio of needed to allocated rows since the last read: fp64 on the device."""
        peak = torch.zeros((), dtype=torch.float64, device=self._device)
        for rows, most in self._most.items():
            peak = torch.maximum(peak, most.double() / rows)
        return peak

    def grow(self) -> float:
        """Enlarge it for the overflowed step, with headroom; needed rows over the balanced load."""
        # A pipeline stage without experts has granted nothing, and grows all the same.
        needed = (self._granted or self.factor) * self.peak
        self.factor = max(self.factor, needed * _HEADROOM)
        return needed

    def reset(self) -> None:
        for most in self._most.values():
            most.zero_()


class Budget:
    """Number of rows of a rank's experts, and of its blocks to other nodes, shared by all layers.

    `reruns` is the number of steps that were rerun.
    """

    def __init__(self, capacity_factor: float, device: torch.device) -> None:
        """Start with buffers of `capacity_factor` x the balanced load; the record is on `device`.

        Raises ValueError for a factor that is not finite, or below 1.
        """
        if not (math.isfinite(capacity_factor) and capacity_factor >= 1):
            raise ValueError(
                f"capacity factor {capacity_factor} is below the balanced load: "
                "set parallel.capacity_factor to 1 or more"
            )
        self.experts = Capacity(float(capacity_factor), device)
        self.blocks = Capacity(block_factor(capacity_factor), device)
        self.reruns = 0

    @property
    def capacity_factor(self) -> float:
        return self.experts.factor

    def rows(
        self, tokens: int, top_k: int, ranks: int, local_experts: int, *, most: int | None = None
    ) -> int:
        """Expert rows S for T tokens a rank: factor x T x K in whole tiles, at most `most`.

        That is by default every received token at min(K, L) of this rank's experts; with one rank T
        * K.
        """
        if most is None:
            most = ranks * tokens * min(top_k, local_experts)
        return self.experts.rows(tokens * top_k, most=most, multiple=ROW_MULTIPLE)

    def block_rows(self, tokens: int, share: float) -> int:
        """Rows C of the block of T tokens for a node, at most T.

        `share`: part of the tokens that have an expert on a node, on average.
        """
        return self.blocks.rows(share * tokens, most=tokens) if tokens else 0

    def record(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """Largest ratios of needed to allocated rows on any rank of `group` since the last read.

        fp64 [2] on the device, of expert rows and of blocks between nodes.
        """
        peaks = torch.stack((self.experts.record(), self.blocks.record()))
        if group is not None:
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=group)
        return peaks

    def exceeded(self, peaks: Sequence[float]) -> bool:
        """True if the values of `record` mean an overflow; starts the next record."""
        self.experts.peak, self.blocks.peak = peaks
        self.reset()
        return max(peaks) > 1

    def grow(self) -> list[Growth]:
        """Enlarge what the step overflowed so that it fits with headroom; count its rerun."""
        small = [capacity for capacity in (self.experts, self.blocks) if capacity.peak > 1]
        if not small:
            raise RuntimeError(
                f"grow() after a step that fitted (peak {self.experts.peak:.3f} of the budget)"
            )
        self.reruns += 1
        return [Growth(c.grow(), c.factor, c is self.blocks) for c in small]

    def reset(self) -> None:
        """Clear the observations since the last read, as after a step that is discarded."""
        self.experts.reset()
        self.blocks.reset()
