"""Overflow of a budget of expert rows after a step."""

import torch.distributed as dist

from phalanx.parallel.dispatcher.capacity import Budget


def overflowed(budget: Budget, group: dist.ProcessGroup | None = None) -> bool:
    """True if a layer on a rank of `group` needed more rows than allocated since the last call."""
    return budget.exceeded(budget.record(group).tolist())
