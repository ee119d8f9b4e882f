"""What a budget of expert rows has to say after a step."""

import torch.distributed as dist

from phalanx.parallel.dispatcher.capacity import Budget


def overflowed(budget: Budget, group: dist.ProcessGroup | None = None) -> bool:
    """Whether a layer on a rank of `group` needed more rows than it had since the last call."""
    return budget.exceeded(float(budget.record(group)))
