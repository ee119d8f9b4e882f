"""Names ranks that keep all others waiting: those that give their device its steps late.

Fed by the trainer with a time of every rank and step, on the host: until the rank had its data and,
on a GPU, had launched its step. In the first exchange of a step all ranks wait for the last one, so
their whole steps take equally long, and only what comes before tells them apart. A GPU that
computes slowly is not seen here. One late step is normal; what lasts is told, and not more often
than every `EVERY` steps.

Legend: R ranks.
"""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

PATIENCE = 20
"""Steps for which a rank is late in every record, before it is told."""
EVERY = 500
"""Steps between two warnings."""
SHARE = 0.05
"""Of a step, by which a late rank is behind the median rank."""
_MOST = 8
"""Late ranks in a record or a warning."""


class SlowRanks:
    """Looks for them; the same on every rank.

    Args:
        names: of the ranks, in their order.
        step: that the run starts from.
    """

    def __init__(self, names: Sequence[str], step: int) -> None:
        self._names, self._step = names, step
        self._sums_R = torch.zeros(len(names), dtype=torch.float64)
        self._count = 0
        self._since: dict[int, int] = {}  # rank -> last step in time
        self._told = -EVERY

    def add(self, seconds_R: Tensor) -> None:
        """Note a step: fp64 on the host."""
        self._sums_R += seconds_R
        self._count += 1

    def look(self, step: int, step_time: float) -> tuple[dict[str, float], list[str]]:
        """The late ranks of the steps since the last call, worst first, and warnings that are due.

        Args:
            step: that was reached.
            step_time: mean seconds of a step.

        Returns:
            Rank -> seconds by which it was behind the median rank; lines.
        """
        before, self._step = self._step, step
        means = (self._sums_R / max(1, self._count)).tolist()
        self._forget()
        usual = statistics.median_low(means)
        behind = {rank: mean - usual for rank, mean in enumerate(means)}
        late = {rank: lag for rank, lag in behind.items() if lag > SHARE * step_time}
        self._since = {rank: self._since.get(rank, before) for rank in late}
        worst = sorted(late, key=lambda rank: -late[rank])[:_MOST]
        lasting = [rank for rank in worst if step - self._since[rank] >= PATIENCE]
        warnings = []
        if lasting and step - self._told >= EVERY:
            self._told = step
            shares = {rank: f"{late[rank] / step_time:.0%} of a step" for rank in lasting}
            named = "; ".join(
                f"{self._names[rank]} by {late[rank]:.3f} s ({shares[rank]})" for rank in lasting
            )
            warnings = [
                f"warning: slow for {PATIENCE} steps, all other ranks wait: {named}; look at the "
                "host's load and at where its data.blend lies"
            ]
        return {str(rank): round(late[rank], 6) for rank in worst}, warnings

    def rewind(self, step: int) -> None:
        """Forget what came after `step`, to which the run goes back."""
        self._step = step
        self._forget()
        self._since.clear()

    def _forget(self) -> None:
        self._sums_R.zero_()
        self._count = 0
