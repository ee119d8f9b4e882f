"""A budget of expert rows that is far too small every few steps, for runs that must not notice.

`python -m tests.crowding [overrides]`, also under torchrun, is train.py with such a budget.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

EVERY = 10
"""Steps from one time to the next, of which the first is the first step."""


@contextlib.contextmanager
def crowded(rank: int = 0) -> Iterator[None]:
    """A `tests.runs.Change`: every `EVERY` steps the experts of all ranks lose their rows."""
    from moe.trainer import Trainer

    original = Trainer._train_step

    def step(self: Any) -> bool:
        if self.step % EVERY == 0:
            _shrink(self)
        return original(self)

    Trainer._train_step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Trainer._train_step = original  # type: ignore[method-assign]


def _shrink(trainer: Any) -> None:
    """To a tenth of the balanced load; the next step is eager, or captured, by turns."""
    from parallel.graph import WARM_STEPS

    budget, graph = trainer.job.budget, trainer.compute.graph
    budget.capacity_factor, budget._granted = 0.1, 0.0
    if graph is not None:
        graph.drop()  # it has the sizes of before
        if trainer.step // EVERY % 2:
            graph._warm = WARM_STEPS


if __name__ == "__main__":
    import train

    with crowded():
        train._leave(train.main(sys.argv[1:]))
