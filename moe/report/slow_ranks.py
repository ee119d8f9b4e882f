"""Names slow ranks: those whose host launches its steps late, so that all others wait.

The trainer passes a time of every rank and step, measured on the host: until the rank had its data
and, on a GPU, had launched its step. Total step times are equal, as all ranks wait for the last one
in the first exchange. A GPU that computes slowly is not detected here. Only lasting delays cause a
warning, at most one every `EVERY` steps.

Legend: R ranks.
"""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

PATIENCE = 20  # steps for which a rank is late in every record, before a warning
EVERY = 500  # steps between two warnings
SHARE = 0.05  # fraction of a step by which a late rank is behind the median rank
_MOST = 8  # late ranks in a record or a warning


class SlowRanks:
    """Detects slow ranks, by `names` in their order, with the same result on every rank."""

    def __init__(self, names: Sequence[str], step: int) -> None:
        self._names, self._step = names, step
        self._sums_R = torch.zeros(len(names), dtype=torch.float64)
        self._count = 0
        self._since: dict[int, int] = {}  # rank -> last step in time
        self._warned = -EVERY

    def add(self, seconds_R: Tensor) -> None:
        """Add the seconds of a step: fp64 [R] on the host."""
        self._sums_R += seconds_R
        self._count += 1

    def look(self, step: int, step_time: float) -> tuple[dict[str, float], list[str]]:
        """The late ranks of the steps since the last call, worst first, and warnings that are due.

        The `step_time` is the mean, in seconds. Ranks have seconds behind the median rank.
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
        if lasting and step - self._warned >= EVERY:
            self._warned = step
            shares = {rank: f"{late[rank] / step_time:.0%} of a step" for rank in lasting}
            named = "; ".join(
                f"{self._names[rank]} by {late[rank]:.3f} s ({shares[rank]})" for rank in lasting
            )
            warnings = [
                f"warning: slow for {PATIENCE} steps, all other ranks wait: {named}; check the "
                "host's load and the storage of its data.blend"
            ]
        return {str(rank): round(late[rank], 6) for rank in worst}, warnings

    def rewind(self, step: int) -> None:
        """Forget everything after `step`, to which the run returns."""
        self._step = step
        self._forget()
        self._since.clear()

    def _forget(self) -> None:
        self._sums_R.zero_()
        self._count = 0
