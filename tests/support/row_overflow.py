"""A budget of expert rows that is far too small every few steps; results must not change.

`python -m tests.support.row_overflow [overrides]` is train.py with such a budget, also in torchrun.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

EVERY = 10
"""Period in steps, starting with the first step."""


@contextlib.contextmanager
def overflow_sometimes(rank: int = 0) -> Iterator[None]:
    """A `runs.Change` that shrinks the row budget of all ranks every `EVERY` steps."""
    from phalanx.moe.run.trainer import Trainer

    original = Trainer._train_step

    def step(self: Any) -> bool:
        if self.step % EVERY == 0:
            _shrink(self)
        return original(self)

    with mock.patch.object(Trainer, "_train_step", step):
        yield


@contextlib.contextmanager
def overflow_always(rank: int = 0) -> Iterator[None]:
    """A `runs.Change` that shrinks it before every step and validation batch; without graphs."""
    from phalanx.moe.run.step import Step

    original = Step.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _take_rows(self.job.budget)
        return original(self, *args, **kwargs)

    with mock.patch.object(Step, "__call__", call):
        yield


def _take_rows(budget: Any) -> None:
    """Leave a tenth of the balanced load."""
    budget.experts.factor, budget.experts._granted = 0.1, 0.0


def _shrink(trainer: Any) -> None:
    """Shrink the budget; the next step is eager or captured, alternately."""
    from phalanx.configs.capture import WARM_STEPS

    budget, graph = trainer.job.budget, trainer.compute.graph
    _take_rows(budget)
    if graph is not None:
        graph.drop()  # it was captured with the old sizes
        if trainer.step // EVERY % 2:
            graph._warm = WARM_STEPS


if __name__ == "__main__":
    from phalanx import train

    with overflow_sometimes():
        train._leave(train.main(sys.argv[1:], ends_process=True))
