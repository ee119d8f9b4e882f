"""Steps that cannot be captured, or have another size than the captured one.

The run continues eagerly if `run.graph=auto` allows it, and drops a graph of another size.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from phalanx.configs.capture import WARM_STEPS
from phalanx.moe.run import step as steps
from phalanx.parallel.cuda_graph import CaptureFailed, Inputs
from tests.support.runs import SMALL, exact, records, run

pytestmark = pytest.mark.dist

STEPS = 5
OVERRIDES = ["model=tiny_deepseek", *SMALL, f"run.steps={STEPS}", "run.save_interval=-1"]


class _NeverCaptured:
    """Replacement of the graph: eager steps, then a capture that fails in the backward pass."""

    count = micro_batches = 0

    def __init__(self, step: Any) -> None:
        self._step, self._warm = step, 0

    def __call__(self, inputs: Inputs) -> Tensor:
        self._warm += 1
        totals: Tensor = self._step(inputs)
        if self._warm <= WARM_STEPS:
            return totals
        raise CaptureFailed("RuntimeError: not while capturing (loss.py:7)")

    def drop(self) -> None: ...


class _OfOneSize:
    """Replacement of the graph: a captured step has the micro-batches of its capture."""

    pool = None

    def __init__(self, step: Any) -> None:
        self._step = step
        self.micro_batches = 0
        self.sizes: list[int] = []
        """Micro-batches of each capture."""

    @property
    def count(self) -> int:
        return int(self.micro_batches > 0)

    def __call__(self, inputs: Inputs) -> Tensor:
        if not self.micro_batches:
            self.micro_batches = len(inputs)
            self.sizes.append(len(inputs))
        assert self.micro_batches == len(inputs)
        return self._step(inputs)  # type: ignore[no-any-return]

    def drop(self) -> None:
        self.micro_batches = 0


@contextlib.contextmanager
def captured(rank: int, kind: type) -> Iterator[list[int]]:
    """A `Change`: a run on a CPU behaves as if its steps were captured by a `kind` of graph."""
    original, sizes = steps.Step.__init__, list[int]()

    def results(self: Any, cfg: Any, job: Any) -> None:
        original(self, cfg, job)
        self.graph = kind(self.forward_backward)
        self.graph.sizes = sizes

    with mock.patch.object(steps.Step, "__init__", results):
        yield sizes


def test_another_number_of_micro_batches_is_captured_anew(tmp_path: Path) -> None:
    """Validations have a number of their own, and are not captured."""
    more = ["data.micro_batch=2", "data.batch_warmup=[2:64]", "run.eval_interval=1"]
    more += ["data.cache=" + str(tmp_path / "cache"), "run.eval_batches=1"]
    args = [*OVERRIDES, *more]
    eager = run(1, [*args, f"run.dir={tmp_path}/eager"])
    graph = run(1, [*args, f"run.dir={tmp_path}/graph"], partial(captured, kind=_OfOneSize))
    assert [rank.code for rank in (*eager, *graph)] == [0, 0], graph[0].err
    assert graph[0].seen == [1, 4]
    want, got = (records(tmp_path / name / "run") for name in ("eager", "graph"))
    assert exact(got) == exact(want) and [r["labels"] for r in got] == [32, 32, 128, 128, 128]


def test_auto_goes_on_eagerly_says_so_and_counts(tmp_path: Path) -> None:
    eager = run(2, [*OVERRIDES, f"run.dir={tmp_path}/eager"])
    failing = run(
        2, [*OVERRIDES, f"run.dir={tmp_path}/failing"], partial(captured, kind=_NeverCaptured)
    )
    assert [rank.code for rank in (*eager, *failing)] == [0] * 4
    want, got = (records(tmp_path / name / "run") for name in ("eager", "failing"))
    assert exact(got) == exact(want)
    assert [r["mtp_loss"] for r in got] == [r["mtp_loss"] for r in want]
    assert [r.get("eager_steps") for r in got] == [None, None, 1, 2, 3]
    output = "could not be captured as a CUDA graph: RuntimeError: not while capturing (loss.py:7)"
    assert f"{output}; steps are eager from step 3 on" in failing[0].out
    assert failing[0].out.count("could not be captured") == 1
