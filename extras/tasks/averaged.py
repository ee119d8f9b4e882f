"""The moving averages of a run (`optim.ema`) in place of its weights, for a while.

Each rank exchanges the shard that it updates, and all gather the shards as after an update. The
weights wait in host memory and come back bit for bit: training does not notice.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from phalanx.parallel.engine import Engine
from phalanx.parallel.megatron.updated import AVERAGE, parts, updated


@contextmanager
def averaged(engine: Engine) -> Iterator[None]:
    """Inside, forward passes use the averages, rounded to the dtype of the weights. Collective."""
    waiting = list[tuple[torch.Tensor, torch.Tensor]]()
    try:
        with torch.no_grad():
            for part in parts(engine.optimizer):
                for each in updated(part):
                    own = each.parameter.detach().view(-1)[each.start : each.stop]
                    waiting.append((own, own.to("cpu", copy=True)))
                    own.copy_(part.optimizer.state[each.main][AVERAGE].view(-1))
        _gather(engine)
        yield
    finally:
        with torch.no_grad():
            for own, kept in waiting:
                own.copy_(kept)
        _gather(engine)


def _gather(engine: Engine) -> None:
    """Gather what each data parallel rank has a part of, before this returns."""
    if any(isinstance(part, DistributedOptimizer) for part in parts(engine.optimizer)):
        for chunk in engine.chunks:
            chunk.start_param_sync(force_sync=True)
