"""A step that cannot be captured: the run continues eagerly if `run.graph=auto` allows it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from phalanx.moe.training import step as steps
from phalanx.parallel.cuda_graph import WARM_STEPS, CaptureFailed, Inputs
from tests.support.runs import SMALL, exact, records, run

pytestmark = pytest.mark.dist

STEPS = 5
OVERRIDES = ["model=tiny_deepseek", *SMALL, f"run.steps={STEPS}", "run.save_interval=-1"]


class _NeverCaptured:
    """Replacement of the graph: eager steps, then a capture that fails in the backward pass."""

    def __init__(self, step: Any) -> None:
        self._step, self._warm = step, 0

    def __call__(self, inputs: Inputs) -> Tensor:
        self._warm += 1
        totals: Tensor = self._step(inputs)
        if self._warm <= WARM_STEPS:
            return totals
        raise CaptureFailed("RuntimeError: not while capturing (loss.py:7)")

    def drop(self) -> None: ...


@contextlib.contextmanager
def never_captured(rank: int) -> Iterator[None]:
    """A `Change`: a run on a CPU behaves as if its steps were captured."""
    original = steps.Step.__init__

    def results(self: Any, cfg: Any, job: Any) -> None:
        original(self, cfg, job)
        self.graph = _NeverCaptured(self.forward_backward)

    with mock.patch.object(steps.Step, "__init__", results):
        yield


def test_auto_goes_on_eagerly_says_so_and_counts(tmp_path: Path) -> None:
    eager = run(2, [*OVERRIDES, f"run.dir={tmp_path}/eager"])
    failing = run(2, [*OVERRIDES, f"run.dir={tmp_path}/failing"], never_captured)
    assert [rank.code for rank in (*eager, *failing)] == [0] * 4
    want, got = (records(tmp_path / name / "run") for name in ("eager", "failing"))
    assert exact(got) == exact(want)
    assert [r["mtp_loss"] for r in got] == [r["mtp_loss"] for r in want]
    assert [r.get("eager_steps") for r in got] == [None, None, 1, 2, 3]
    output = "could not be captured as a CUDA graph: RuntimeError: not while capturing (loss.py:7)"
    assert f"{output}; steps are eager from step 3 on" in failing[0].out
    assert failing[0].out.count("could not be captured") == 1
