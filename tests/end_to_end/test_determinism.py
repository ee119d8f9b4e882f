"""The same run twice, interrupted or not, gives bitwise equal numbers.

The rest of this guarantee is tested with its parts: the order of tokens in
tests/moe/data/test_loader.py, checkpoints on other layouts in tests/parallel, other layouts in
tests/end_to_end/layouts/test_layouts.py, tokens and losses of a run that moves between layouts in
tests/end_to_end/test_train.py.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.runs import DEEPSEEK, SMALL, exact, records, run, with_corpus
from tests.support.training import digest

pytestmark = pytest.mark.dist

BIASED = [*DEEPSEEK, "model.moe.router.bias_rate=0.01"]


def documents() -> list[list[int]]:
    """A fixed corpus of an invented small language, whose letters can be learnt."""
    rng = random.Random(0)
    words = [[rng.randrange(97, 123) for _ in range(rng.randrange(1, 8))] for _ in range(60)]
    return [
        [letter for _ in range(rng.randrange(5, 60)) for letter in (*rng.choice(words), 32)]
        for _ in range(300)
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    data = with_corpus(tmp_path_factory.mktemp("corpus"), documents())
    return [*SMALL, *data, "data.micro_batch=2"]  # two of them a step on each of two ranks


def state_of(trainer: Any) -> dict[str, Any]:
    """State on this rank that the next step depends on: digests and plain numbers."""
    from phalanx.parallel import random_states as rng
    from phalanx.parallel.checkpoint.model_state import parameters_gathered

    engine = trainer.job.engine

    with parameters_gathered(engine.chunks):
        named = [n for c in engine.modules for n in c.named_parameters()]
        buffers = [b for c in engine.modules for b in c.named_buffers()]
        parts = engine.optimizer.chained_optimizers
        groups = [group for part in parts for group in part.param_groups]
        states = rng.get()
        return {
            "parameters": digest([p for _, p in named]),
            "masters": digest([p for group in groups for p in group["params"]]),
            "moments": digest(
                [t for p in parts for s in p.optimizer.state.values() for t in s.values()]
            ),
            "router bias": digest([b for name, b in buffers if "expert_bias" in name]),
            "steps": [group.get("step") for group in groups],
            "rates": [group["lr"] for group in groups],
            "random states": [
                repr(states["python"]),
                [repr(np.asarray(part).tolist()) for part in states["numpy"][1:2]],
                digest([states["torch"], *states["tracker"].values()]),
            ],
            "cursor": trainer.data.loader.state_dict(),
            "health": trainer.progress.health.state_dict(),
        }


@contextmanager
def last_state(rank: int) -> Iterator[dict[str, Any]]:
    """State after the last step; each step draws random numbers, as dropout would."""
    from phalanx.moe.run.trainer import Trainer

    step, seen = Trainer._train_step, dict[str, Any]()

    def watched(self: Any) -> bool:
        random.random(), np.random.random(), torch.rand(3)
        stopping = step(self)
        if self.step == self.cfg.run.steps:
            seen.update(state_of(self))
        return stopping

    with mock.patch.object(Trainer, "_train_step", watched):
        yield seen


def test_twice_and_resumed(corpus: list[str], tmp_path: Path) -> None:
    """4 steps on two ranks twice, and the last 2 again: losses, gradient norms, the whole state."""
    command = [*corpus, *BIASED, "run.skip_spikes=6", "run.steps=4", "run.save_interval=2"]
    once = run(2, [*command, f"run.dir={tmp_path / 'a'}"], last_state)
    twice = run(2, [*command, f"run.dir={tmp_path / 'b'}"], last_state)
    saved = tmp_path / "a/run/checkpoints/step_00000002"
    resumed = [*command, f"run.dir={tmp_path / 'c'}", f"run.resume={saved}"]
    repeated = run(2, resumed, last_state)
    actual = [exact(records(tmp_path / name / "run")) for name in "abc"]
    assert len(actual[0]) == 4 and actual[0] == actual[1] and actual[0][2:] == actual[2]
    for rank in (0, 1):
        first = once[rank].seen
        assert first["cursor"] == {"consumed_samples": 32}
        assert len(first["health"]["seen"]["loss"]) == 4
        assert twice[rank].seen == first
        assert repeated[rank].seen == first
    assert once[0].seen["moments"] != once[1].seen["moments"], "ranks hold shards of their own"


GOLDEN = {20: 4.5362730, 100: 3.2740798}
"""Loss by step, fp32; the same to the last bit on CPUs with AVX-512 and with none."""


@pytest.mark.parametrize("steps", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_golden_run(steps: int, corpus: list[str], tmp_path: Path) -> None:
    """A difference means that training itself has changed."""
    more = ["model=tiny", "model.attention.head_dim=8", "optim.decay_steps=100"]
    more += [f"run.steps={steps}", "precision=fp32", "run.save_interval=-1"]
    more += ["run.log_interval=20", "optim.lr=1e-3", f"run.dir={tmp_path}"]
    (main,) = run(1, [*corpus, *more])
    losses = {r["step"]: r["loss"] for r in records(tmp_path / "run")}
    assert main.code == 0 and max(losses) == steps
    for step in losses.keys() & GOLDEN.keys():
        assert losses[step] == pytest.approx(GOLDEN[step], abs=1e-4)
