"""Checkpoints of sharded parameters are those of any other layout."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.checkpoint.checkpoints import (
    assert_equal,
    build,
    checkpointer,
    load,
    save,
    stored,
    train,
)
from tests.support.distributed import run_distributed
from tests.support.training import pretended_nodes

ZERO3 = {"distributed_optimizer": "zero3"}


def _through(folders: list[Path], kinds: list[dict[str, Any]]) -> list[list[float]]:
    """In each kind: load what the one before has saved, save it again, and train on."""
    losses = []
    for (before, folder), kw in zip(pairwise(folders), kinds, strict=True):
        with pretended_nodes(2):
            engine, groups = build(seed=len(str(folder)), **kw)
        checkpoints = checkpointer(folder, groups, async_save=bool(kw.get("bf16")))
        if before.exists():
            load(checkpoints, before / "step_00000003", engine)
        else:
            train(engine, groups, 0, 3)
        save(checkpoints, 3, engine)
        losses.append([loss for loss, _ in train(engine, groups, 3, 5)])
        checkpoints.close()
    return losses


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        (2, [{"bf16": False, "layers": 3, **kind} for kind in (ZERO3, {}, ZERO3)]),
        (
            4,
            [
                {"bf16": True, "moments": "bf16", "expert": 2} | ZERO3,
                {"bf16": True, "moments": "bf16", "expert": 4},
                {"bf16": True, "moments": "bf16", "distributed_optimizer": "zero3_node"},
                {"bf16": True, "moments": "bf16", "expert": 1} | ZERO3,
            ],
        ),
    ],
    ids=["fp32", "split masters"],
)
def test_the_same_bytes_and_the_same_next_steps(
    tmp_path: Path, world: int, kinds: list[dict[str, Any]]
) -> None:
    folders = [tmp_path / str(i) for i in range(len(kinds) + 1)]
    ranks = run_distributed(_through, world, folders, kinds)
    first, *others = (stored(folder / "step_00000003") for folder in folders[1:])
    assert any(name.startswith("optimizer.state.exp_avg.") for name in first)
    for other in others:
        assert_equal(first, other)
    losses = [
        [sum(parts) for parts in zip(*each, strict=True)] for each in zip(*ranks, strict=True)
    ]
    tolerance = 3e-3 if kinds[0]["bf16"] else 2e-6  # experts are summed by other ranks
    for loss in losses[1:]:
        assert loss == pytest.approx(losses[0], rel=tolerance)


def _into_other_masters(folder: Path) -> None:
    """fp32 masters to split ones and back, in and out of sharded parameters."""
    engine, groups = build(bf16=True)
    train(engine, groups, 0, 2)
    save(checkpointer(folder / "0", groups), 2, engine)
    for i, kw in enumerate(({"moments": "bf16"} | ZERO3, ZERO3, {})):
        engine, groups = build(seed=5, bf16=True, **kw)
        checkpoints = checkpointer(folder / str(i + 1), groups)
        load(checkpoints, folder / str(i) / "step_00000002", engine)
        save(checkpoints, 2, engine)


@pytest.mark.dist
def test_master_weights_of_another_kind(tmp_path: Path) -> None:
    run_distributed(_into_other_masters, 2, tmp_path)
    first, last = (stored(tmp_path / str(i) / "step_00000002") for i in (0, 3))
    for name in [name for name in first if "exp_avg" not in name]:  # moments pass through bf16
        assert (first[name] - last[name]).abs().max() == 0, name


def _weights_alone(folder: Path) -> tuple[list[float], list[float]]:
    from phalanx.parallel.checkpoint.optimizer_state import begin_anew

    losses = []
    for kind in ({}, ZERO3):
        engine, groups = build(bf16=True, **kind)
        train(engine, groups, 0, 2)
        checkpoints = checkpointer(folder / str(len(losses)), groups)
        path = save(checkpoints, 2, engine)
        engine, groups = build(seed=9, bf16=True, **kind)
        checkpoints.load(path, engine.chunks)  # the model only
        from phalanx.parallel.checkpoint.model_state import parameters_whole

        with parameters_whole(engine.chunks):
            begin_anew(engine.optimizer)
        losses.append([loss for loss, _ in train(engine, groups, 2, 4)])
    return losses[0], losses[1]


@pytest.mark.dist
def test_weights_alone_begin_a_new_run(tmp_path: Path) -> None:
    for plain, sharded in run_distributed(_weights_alone, 2, tmp_path):
        assert sharded == pytest.approx(plain, rel=1e-3)
