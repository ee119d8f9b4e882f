"""A tiny model that has learned a little, its tokenizer, files of tasks, and its export."""

import contextlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from phalanx.scripts import convert_hf, prepare_data, train_tokenizer
from tests.extras.tasks.examples import LEARNED, TASKS
from tests.support.tiny_runs import step_of, train


class Trained(NamedTuple):
    """A run, and what it was made with."""

    folder: Path  # of the run
    step: Path
    overrides: list[str]
    tasks: list[str]  # files

    @property
    def given(self) -> list[str]:
        """Overrides of a run that scores the tasks."""
        return [*self.overrides, f"run.tasks=[{','.join(self.tasks)}]"]


def write(path: Path, rows: Sequence[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    sources = [Path(module.__file__ or "").read_text() for module in (contextlib, random)]
    texts = [text for source in sources for text in source.split("\n\n") if len(text) > 16]
    texts += [LEARNED] * len(texts)
    text = write(folder / "text.jsonl", [{"text": text} for text in texts])
    words = str(folder / "tokenizer.json")
    given = ["--size", "384", "--special", "<|end|>", "--output", words]
    assert train_tokenizer.main([text, *given]) == 0
    given = ["--tokenizer", words, "--eod", "<|end|>", "--workers", "1"]
    assert prepare_data.main([text, *given, "--output", str(folder / "ids")]) == 0
    overrides = ["data=indexed", f"data.blend=[{folder / 'ids'}]", "model.vocab_size=384"]
    overrides += ["data.sequence_length=64", "data.micro_batch=2", "parallel.capacity_factor=2"]
    learning = ["run.steps=60", "optim.decay_steps=60", "optim.lr=2e-2"]
    run = train(folder, "origin", 1, *overrides, *learning)
    tasks = [write(folder / f"{name}.jsonl", rows) for name, rows in TASKS.items()]
    return Trained(run, step_of(run, 60), overrides, tasks)


@pytest.fixture(scope="session")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert convert_hf.main(["export", str(trained.step), str(folder), "--dtype", "fp32"]) == 0
    return folder
