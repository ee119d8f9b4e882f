"""Scores in a run: on every layout those of its checkpoint, and training goes on as without."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.configs.load import load
from phalanx.moe.hf.pieces import PieceReader
from phalanx.moe.report.loggers import read
from phalanx.moe.report.service import tag
from phalanx.moe.run.preflight import preflight
from phalanx.parallel.engine import Engine
from phalanx.scripts import checkpoint, evaluate
from tests.extras.tasks.conftest import Trained, write
from tests.support.runs import exact, run
from tests.support.scheduling import mostly_slow
from tests.support.tiny_runs import TINY, command, step_of, untrained

pytestmark = pytest.mark.dist

LAYOUTS = {
    "one": (1, ["data.micro_batch=4"]),
    "data": (2, ["parallel.expert=1"]),
    "expert": (2, ["parallel.expert=2"]),
    "tensor": (2, ["parallel.tensor=2", "parallel.expert=1"]),
    "pipeline": (2, ["parallel.pipeline=2"]),
    "context": (2, ["parallel.context=2"]),
    "documents": (2, ["data.document_mask=true"]),
    "both": (4, ["parallel.tensor=2", "parallel.context=2"]),
}

SHARDINGS = {
    "overlapped": ["parallel.overlap=true"],
    "sharded": ["parallel.overlap=false"],
    "whole": ["parallel.distributed_optimizer=false"],
}


def evaluated(folder: Path, tasks: list[str], out: Path) -> dict[str, float]:
    """Scores of a checkpoint by evaluate.py."""
    done = command(evaluate.main, folder, "--tasks", *tasks, "--json", out)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == len(tasks) + 1
    scores: dict[str, float] = json.loads(out.read_text())["tasks"]
    return scores


@pytest.fixture(scope="session")
def alone(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return evaluated(trained.step, trained.tasks, tmp_path_factory.mktemp("alone") / "out.json")


def of_record(record: dict[str, Any], prefix: str) -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in record.items() if k.startswith(prefix)}


@mostly_slow("layout", LAYOUTS, "expert", "context")
def test_layouts_agree_with_the_checkpoint(
    layout: str, alone: dict[str, float], trained: Trained, tmp_path: Path
) -> None:
    world, more = LAYOUTS[layout]
    given = [*trained.given, "run.steps=61", *more]
    folder = untrained(tmp_path, layout, world, trained.step, *given)
    (record,) = read(folder / "metrics.jsonl")
    found = of_record(record, "tasks/")
    assert found.keys() == alone.keys() and len(found) == 46
    assert found == pytest.approx(alone, rel=1e-4, abs=1e-9)
    assert 0 < found["continuation/acc"] < 1 and 0 < found["answers/exact_match"] < 1


@pytest.mark.slow
def test_interleaved_stages_agree_with_one_rank(trained: Trained, tmp_path: Path) -> None:
    found = []
    for world, more in (
        (1, []),
        (2, ["parallel.pipeline=2", "parallel.virtual_pipeline=2"]),
    ):
        given = [*TINY, *trained.given, "model.layers=4", "run.steps=1", *more]
        main = run(world, [*given, f"run.dir={tmp_path}", f"run.name=of{world}"])[0]
        assert main.code == 0, main.err
        (record,) = read(tmp_path / f"of{world}" / "metrics.jsonl")
        found.append(of_record(record, "tasks/"))
    assert found[1] == pytest.approx(found[0], rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(
    "more",
    [
        ["precision=fp32", "parallel.expert=1"],
        ["precision=bf16", "optim.moments=bf16", "parallel.expert=1"],
    ],
    ids=["fp32", "bf16"],
)
def test_training_goes_on_bit_for_bit(more: list[str], trained: Trained, tmp_path: Path) -> None:
    """With averages that are put in place of the weights after every step, and back."""
    found, tensors = [], []
    for name, scored in (("plain", False), ("scored", True)):
        tasks = ",".join(trained.tasks[-3:] if scored else [])
        given = [*TINY, *trained.overrides, f"run.tasks=[{tasks}]", "optim.ema=0.9", *more]
        given.append("run.steps=3")
        where = [f"run.dir={tmp_path}", f"run.name={name}", "run.eval_interval=1"]
        main = run(2, [*given, *where])[0]
        assert main.code == 0, main.err
        assert main.out.count("-- scores after step") == 3 * scored
        assert main.out.count("-- scores of the moving averages after step") == 3 * scored
        records = read(tmp_path / name / "metrics.jsonl")
        found.append((exact(records), [record["layers"] for record in records]))
        reader = PieceReader(step_of(tmp_path / name, 3), lambda done, total: None)
        tensors.append(
            {k: reader.read(k, (0, reader.shape(k)[0])) for k in reader.keys() if reader.shape(k)}
        )
    assert found[0] == found[1]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(value, tensors[1][key]) for key, value in tensors[0].items())


@mostly_slow("sharding", SHARDINGS, "overlapped")
def test_averages_have_the_scores_of_their_checkpoint(
    sharding: str, trained: Trained, tmp_path: Path
) -> None:
    given = [*TINY, *trained.given, "optim.ema=0.5", "run.steps=63", "parallel.expert=1"]
    given += [f"run.resume={trained.step}", f"run.dir={tmp_path}", "optim.lr=1e-2"]
    given += ["optim.decay_steps=80", "run.name=ema", *SHARDINGS[sharding]]
    main = run(2, given)[0]
    assert main.code == 0, main.err
    folder = tmp_path / "ema"
    out = tmp_path / "averages"
    done = command(checkpoint.main, "average", step_of(folder, 63), "--ema", "--out", out)
    assert done.code == 0, done.err
    record = read(folder / "metrics.jsonl")[-1]
    for prefix, place in (("tasks/", folder), ("tasks_ema/", out)):
        expected = evaluated(place, trained.tasks, tmp_path / "scores.json")
        assert of_record(record, prefix) == pytest.approx(expected, rel=1e-4, abs=1e-9)
    key = "texts/bits_per_byte"
    assert abs(record[f"tasks/{key}"] - record[f"tasks_ema/{key}"]) > 1e-3


@contextmanager
def broken(rank: int) -> Iterator[None]:
    """Weights of rank 1 become NaN once they are evaluated."""
    original = Engine.eval

    def evaluate(self: Engine) -> None:
        with torch.no_grad():
            for weight in self.chunks[-1].parameters() if rank else ():
                weight.fill_(torch.nan)
        original(self)

    with mock.patch.object(Engine, "eval", evaluate):
        yield


def test_a_model_without_finite_likelihoods_has_no_scores(trained: Trained, tmp_path: Path) -> None:
    given = [*TINY, *trained.given, "run.steps=1", "parallel.tensor=2", "parallel.expert=1"]
    main = run(2, [*given, f"run.dir={tmp_path}", "run.save_interval=-1"], broken)[0]
    assert main.code == 0, main.err
    assert "-- no scores after step 1: likelihoods of arc are NaN or infinite\n" in main.out


def test_bad_tasks_are_told_before_the_run(trained: Trained, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    given = [*TINY, *trained.overrides, f"run.tasks=[{path}]", f"run.dir={tmp_path}"]
    cfg = load(given)
    for text, reason in (
        (None, "No such file"),
        ('{"question": "a", "choices": ["b", "c"], "gold": 2}', "line 1: the label 2 names none"),
        ('{"task": {"max_tokens": 64}}\n{"prompt": "a", "answer": "b"}', "max_tokens is 64"),
    ):
        if text is not None:
            path.write_text(text)
        (error,) = preflight(cfg).errors
        assert str(path.stem) in str(error) and reason in str(error)
    write(path, [{"question": "a", "choices": ["b", "c"], "gold": 1}])
    assert not preflight(cfg).errors


def test_services_have_the_names_of_the_scores() -> None:
    assert tag("tasks/sums/acc") == "tasks/sums/acc"
    assert tag("tasks_ema/centered") == "tasks_ema/centered"
