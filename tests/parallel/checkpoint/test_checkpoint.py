"""Checkpoints: exact resume, the commit, and what of another configuration may be loaded."""

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.parallel.checkpoint.checkpoints import (
    assert_equal,
    build,
    checkpointer,
    load,
    record,
    save,
    tensors,
    train,
)
from tests.support.distributed import run_distributed
from tests.support.scheduling import slow


def _resume(folder: Path, async_save: bool, kw: dict[str, Any]) -> None:
    engine, groups = build(**kw)
    train(engine, groups, 0, 2)
    checkpoints = checkpointer(folder, groups, async_save=async_save)
    path = save(checkpoints, 2, engine, data={"consumed": 16})
    saved = tensors(engine)
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    expected = train(engine, groups, 2, 4)
    checkpoints.close()

    resumed, groups = build(seed=2, **kw)
    checkpoints = checkpointer(folder, groups)
    assert checkpoints.newest() == path
    common = load(checkpoints, path, resumed)
    assert_equal(tensors(resumed), saved)
    assert common["data"] == {"consumed": 16} and common["step"] == 2
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn
    assert resumed.scheduler.num_steps == 2
    assert train(resumed, groups, 2, 4) == expected
    assert_equal(tensors(engine), tensors(resumed))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "async_save", "kw"),
    [
        (1, False, {}),
        (1, True, {"bf16": False}),
        (1, False, {"kind": "muon"}),
        (1, False, {"moments": "bf16"}),
        (2, True, {"kind": "muon", "moments": "bf16", "ema": 0.9}),
        *slow((2, False, {"distributed_optimizer": False, "overlap": False})),
        (2, False, {"pipeline": 2, "virtual_pipeline": 2, "layers": 4}),
        *slow((2, True, {"expert": 2, "moments": "bf16"}), (2, False, {"expert": 2, "ema": 0.9})),
    ],
)
def test_resume_is_bit_exact(
    tmp_path: Path, world: int, async_save: bool, kw: dict[str, Any]
) -> None:
    """Parameters, masters, moments, router bias, schedule, random states, losses are all equal."""
    run_distributed(_resume, world, tmp_path, async_save, kw)


def _unwritable(folder: Path) -> str:
    from phalanx.parallel.megatron import cpu

    cpu.install()
    from phalanx.parallel.groups import create

    with pytest.raises(RuntimeError) as caught:
        checkpointer(folder, create())
    return str(caught.value)


@pytest.mark.dist
def test_unwritable_folder_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = run_distributed(_unwritable, 2, tmp_path / "file" / "checkpoints")
    assert first == second
    assert "run.dir" in first and os.strerror(errno.ENOTDIR) in first and "\n" not in first


def _commit_record(folder: Path) -> None:
    engine, groups = build(expert=2)
    save(checkpointer(folder, groups), 4, engine)


@pytest.mark.dist
def test_commit_lists_every_file(tmp_path: Path) -> None:
    run_distributed(_commit_record, 2, tmp_path)
    folder = tmp_path / "step_00000004"
    record = json.loads((folder / "COMMIT.json").read_text())
    assert (record["step"], record["world"]) == (4, 2)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    files.pop("COMMIT.json")
    assert {name: size for name, (size, _) in record["files"].items()} == files
    assert {name[:4] for name in files if name.endswith(".distcp")} == {"__0_", "__1_"}


def _refuses(folder: Path, path: Path) -> tuple[str, str, list[str]]:
    from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch

    engine, groups = build(seed=4)
    checkpoints = checkpointer(folder, groups)
    before = tensors(engine)
    with pytest.raises(CheckpointMismatch) as knob:
        load(checkpoints, path, engine, {"model": {"layers": 3}})
    assert_equal(before, tensors(engine))
    lines = record()
    load(checkpoints, path, engine, {"model": {"layers": 2}, "optim": {"lr": 1.0}})
    other, groups = build(experts=8)
    with pytest.raises(CheckpointMismatch) as shape:
        load(checkpoints, path, other)
    return str(knob.value), str(shape.value), lines


@pytest.mark.dist
def test_another_model_is_refused_before_anything_is_touched(run: Path, tmp_path: Path) -> None:
    path = run / "step_00000002"
    knob, shape, lines = run_distributed(_refuses, 1, tmp_path / "other", path)[0]
    assert "model.layers" in knob and "run.resume=never" in knob
    assert "has shape [4, 48, 32], not [8, 48, 32]" in shape or "[4, 32]" in shape
    assert lines == []
