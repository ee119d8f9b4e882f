"""Budget of expert rows: static buffers that are large enough, or a step that is rerun.

Every dispatcher asks `rows` for the size of its buffers and reports the need with `observe`; the
maximum stays on the device. Once per step, before the optimizer, the trainer reads `record`
with its other numbers. If that has `exceeded` the budget, it drops the gradients, calls `grow` and
reruns the step: no token is ever dropped.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

_HEADROOM = 1.1
ROW_MULTIPLE = 128
"""Divisor of the number of expert rows: they fill whole tiles."""


class Budget:
    """Number of rows of the experts of a rank, shared by all layers.

    `capacity_factor` is the current size over the balanced load, `peak` the largest ratio of needed
    to allocated rows of the last read, `reruns` the number of steps that were rerun.
    """

    def __init__(self, capacity_factor: float, device: torch.device) -> None:
        """Start with buffers of `capacity_factor` x the balanced load; the record is on `device`.

        Raises:
            ValueError: the factor is not finite, or below 1 so that any load would overflow.
        """
        if not (math.isfinite(capacity_factor) and capacity_factor >= 1):
            raise ValueError(
                f"capacity factor {capacity_factor} is below the balanced load: "
                "set parallel.capacity_factor to 1 or more"
            )
        self.capacity_factor = float(capacity_factor)
        self.peak = 0.0
        self.reruns = 0
        self._granted = 0.0  # largest S / (T * K): the factor after rounding up to whole tiles
        self._device = device
        self._most: dict[int, Tensor] = {}
        """int64 scalar per allocated number of rows: the largest number that was needed."""

    def rows(
        self, tokens: int, top_k: int, ranks: int, local_experts: int, *, most: int | None = None
    ) -> int:
        """Expert rows S for T tokens a rank: factor x T x K in whole tiles, at most the worst case.

        The worst case is `most` rows, by default those of every received token at min(K, L) of this
        rank's experts; with one rank that is T * K, and a local layer allocates just its need.
        """
        balanced = tokens * top_k
        tiles = math.ceil(self.capacity_factor * balanced / ROW_MULTIPLE)
        if most is None:
            most = ranks * tokens * min(top_k, local_experts)
        rows = min(most, tiles * ROW_MULTIPLE)
        self._granted = max(self._granted, rows / balanced)
        return rows

    def observe(self, needed: Tensor, rows: int) -> None:
        """Note on the device that a layer with `rows` rows needed `needed` (integer scalar).

        In one kernel, as the experts wait for it.
        """
        if rows not in self._most:
            self._most[rows] = torch.zeros((), dtype=torch.int64, device=self._device)
        torch.maximum(self._most[rows], needed, out=self._most[rows])

    def record(self, group: dist.ProcessGroup | None = None) -> Tensor:
        """Largest ratio of needed to allocated rows on any rank of `group` since the last read.

        Returns an fp64 scalar on the device.
        """
        peak = torch.zeros((), dtype=torch.float64, device=self._device)
        for rows, most in self._most.items():
            peak = torch.maximum(peak, most.double() / rows)
        if group is not None:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        return peak

    def exceeded(self, peak: float) -> bool:
        """True if the value of `record` means an overflow; starts the next record."""
        self.peak = peak
        self.reset()
        return peak > 1

    def grow(self) -> float:
        """Enlarge the budget so that the overflowed step fits with headroom; count its rerun.

        Returns:
            Rows that were needed over the balanced load.
        """
        if self.peak <= 1:
            raise RuntimeError(
                f"grow() after a step that fitted (peak {self.peak:.3f} of the budget)"
            )
        # A pipeline stage without experts has granted nothing, and grows all the same.
        needed = (self._granted or self.capacity_factor) * self.peak
        self.capacity_factor = max(self.capacity_factor, needed * _HEADROOM)
        self.reruns += 1
        return needed

    def reset(self) -> None:
        """Clear the observations since the last read, as after a step that is discarded."""
        for most in self._most.values():
            most.zero_()
