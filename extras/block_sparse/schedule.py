"""When masks change, and how many blocks live: numbers of a run, without torch.

All shares are of the steps of the run since its masks began, at step 0 or with the dense checkpoint
that it began with:

    dense | density falls, by a cubic curve | constant, blocks are exchanged | masks stay
    0    FIRST                            FALLEN                           LAST         1

The cubic curve is that of Zhu and Gupta (arXiv 1710.01878), which BLaST (arXiv 2507.03117) takes
too. Exchanges, their share and their end are those of RigL (arXiv 1911.11134).
"""

import math
from dataclasses import dataclass

FIRST = 0.05  # norms of weights tell nothing yet: they are those of the initialization
FALLEN = 0.5
LAST = 0.75  # the end of the decay of the learning rate trains masks that stay
UPDATES = 80  # steps between two updates: a run has about so many intervals,
MOST_STEPS = 100  # but no interval is longer than this
EXCHANGED = 0.3  # share of the living blocks that gradients choose, at first


@dataclass(frozen=True)
class Schedule:
    """Schedule of the masks over `steps` steps; `target` is the share of living blocks."""

    target: float
    steps: int

    @property
    def first(self) -> int:
        """Step after which the masks can change for the first time, counted from 1."""
        return max(1, round(FIRST * self.steps))

    @property
    def fallen(self) -> int:
        """Step after which the density is that of the target: one with an update."""
        updates = round((FALLEN * self.steps - self.first) / self.every)
        return self.first + max(0, updates) * self.every

    @property
    def last(self) -> int:
        """Last step after which masks change."""
        return max(self.fallen, round(LAST * self.steps))

    @property
    def every(self) -> int:
        """Steps between two updates of the masks."""
        return max(1, min(MOST_STEPS, self.steps // UPDATES))

    def due(self, step: int) -> bool:
        """Whether masks change after a step."""
        return self.first <= step <= self.last and (step - self.first) % self.every == 0

    def density(self, step: int) -> float:
        """Share of blocks that live after the update of a step."""
        if step < self.first:
            return 1.0
        if step >= self.fallen:
            return self.target
        left = (self.fallen - step) / (self.fallen - self.first)
        return self.target + (1 - self.target) * left**3

    def exchanged(self, step: int) -> float:
        """Share of the living blocks that gradients choose in the update of a step."""
        return EXCHANGED * (1 + math.cos(math.pi * min(1.0, step / self.last))) / 2


def living_blocks(blocks: int, density: float) -> int:
    """Number of living blocks of a matrix: the nearest whole one, at least 1."""
    return max(1, round(blocks * density))
