"""A rollback to the weights that a run started from leaves the state of a new run, to the bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from phalanx.moe.report.loggers import start_facts
from phalanx.scripts import checkpoint
from tests.end_to_end.faults.test_bad_numbers import _state
from tests.support.runs import TINY, exact, records, run, with_corpus

DEEPSEEK_LIKE = [*TINY, "model.moe.router.score=sigmoid", "model.moe.router.bias_rate=0.01"]
RATES = ["optim.warmup_steps=8", "optim.decay_steps=40", "optim.lr=0.032", "optim.min_lr=0"]
LATER = {"consumed_samples": 26, "undone_samples": 26}
"""Cursor behind the data of five steps of 4, 4, 6, 6 and 6 samples, none of which counts."""


@contextmanager
def watched(rank: int, *, cursor: dict[str, int] | None = None) -> Iterator[list[Any]]:
    """Run from a data cursor; yields (step after it, digest of the state) of every step."""
    from phalanx.moe.run.progress import Progress
    from phalanx.moe.run.trainer import Trainer

    step, resume, seen = Trainer._train_step, Progress.resume, list[Any]()

    def observed(self: Any) -> bool:
        try:
            return step(self)
        finally:
            seen.append((self.step, _state(self), self.progress.health.state_dict()["seen"]))

    def moved(self: Any, *given: Any) -> str:
        text = resume(self, *given)
        if cursor is not None:
            self._data.loader.load_state_dict(cursor)
        return text

    steps = mock.patch.object(Trainer, "_train_step", observed)
    with steps, mock.patch.object(Progress, "resume", moved):
        yield seen


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = with_corpus(tmp_path_factory.mktemp("corpus"))
    batches = ["data.micro_batch=1", "data.global_batch=6", "data.batch_warmup=['4:128']"]
    return [*DEEPSEEK_LIKE, *data, *batches, *RATES, "run.save_interval=0", "run.steps=8"]


@pytest.fixture(scope="module")
def weights(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The mean of a checkpoint: weights and expert biases that have been trained."""
    folder = tmp_path_factory.mktemp("weights")
    (main,) = run(1, [*command, "run.steps=3", f"run.dir={folder}"])
    assert main.code == 0, main.err
    mean = folder / "mean"
    assert checkpoint.main(["average", str(folder / "run"), "--out", str(mean)]) == 0
    return mean


KINDS = {
    "adamw": ["optim.ema=0.9", "run.skip_spikes=100"],
    "bf16 moments": ["precision=bf16", "optim.moments=bf16", "parallel.overlap=true"],
    "muon": ["optim=muon", "optim.ema=0.9", "optim.qk_clip=0.5"],
    "whole": ["parallel.distributed_optimizer=false", "precision=bf16"],
}


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_a_rollback_to_weights_alone_is_a_new_run(
    command: list[str], weights: Path, tmp_path: Path, kind: str
) -> None:
    """As one from these weights that begins with the data behind the bad step."""
    args = [*command, *KINDS[kind], f"run.resume={weights}"]
    bad = ["run.bad_steps=rollback", "run.inject=nan@5:rank0", f"run.dir={tmp_path / 'bad'}"]
    faulty = run(2, [*args, *bad], watched)
    new = run(2, [*args, f"run.dir={tmp_path / 'new'}"], partial(watched, cursor=LATER))
    assert [r.code for r in (*faulty, *new)] == [0] * 4, faulty[0].err
    for rank, other in zip(faulty, new, strict=True):
        assert [step for step, *_ in rank.seen] == [1, 2, 3, 4, 0, *range(1, 9)]
        assert rank.seen[5:] == other.seen
    told = faulty[0].out
    assert told.count("rolled back to ") == 1
    again, clean = records(tmp_path / "bad/run"), records(tmp_path / "new/run")
    assert exact(again) == exact(clean) and len(again) == 8
    assert [r["lr"] for r in again] == pytest.approx([0.004 * n for n in range(1, 9)])
    assert [r["labels"] for r in again] == [16 * size for size in (4, 4, 6, 6, 6, 6, 6, 6)]
    trained = [r["tokens"] for r in again]
    assert trained == [16 * n for n in (4, 8, 14, 20, 26, 32, 38, 44)]
    assert start_facts(tmp_path / "bad/run/metrics.jsonl")["batch"] == 6
