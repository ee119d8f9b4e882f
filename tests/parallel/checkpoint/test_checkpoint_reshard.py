"""Checkpoints on another layout: the same bytes, the same next steps."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.checkpoint.checkpoints import (
    assert_equal,
    build,
    checkpointer,
    load,
    record,
    save,
    stored,
    train,
)
from tests.support.distributed import run_distributed


def _through(folders: list[Path], steps: int, layouts: list[dict[str, Any]]) -> list[list[float]]:
    """In each layout: load what is in the folder before its own (nothing in the first of all),
    save it again, and train on. This rank's part of the loss of each step, by layout."""
    losses = []
    for (before, folder), kw in zip(pairwise(folders), layouts, strict=True):
        engine, groups = build(seed=len(str(folder)), **kw)
        checkpoints = checkpointer(folder, groups)
        if before.exists():
            load(checkpoints, before / "step_00000003", engine)
        else:
            train(engine, groups, 0, 3)
        save(checkpoints, 3, engine)
        parts = kw.get("tensor", 1)  # the ranks of a tensor parallel group report the same
        losses.append([loss / parts for loss, _ in train(engine, groups, 3, 3 + steps)])
    return losses


@pytest.mark.dist
@pytest.mark.parametrize(
    "chain",
    [
        [(4, {"expert": 4}), (1, {}), (2, {"expert": 2})],
        pytest.param([(4, {"expert": 2}), (4, {"expert": 4}), (4, {})], marks=pytest.mark.slow),
        pytest.param(  # test_linear_attention has another
            [
                (2, {"tensor": 2, "experts": 0}),
                (1, {"experts": 0}),
                (2, {"tensor": 2, "experts": 0}),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [(2, {"pipeline": 2}), (1, {}), (2, {"pipeline": 2}), (2, {"expert": 2})],
            marks=pytest.mark.slow,
        ),
        [
            (2, {"pipeline": 2, "virtual_pipeline": 2, "layers": 4}),
            (1, {"layers": 4}),
            (2, {"pipeline": 2, "virtual_pipeline": 2, "layers": 4}),
        ],
        pytest.param([(4, {}), (2, {}), (1, {}), (2, {"overlap": False})], marks=pytest.mark.slow),
        [(2, {"expert": 2}), (2, {"distributed_optimizer": False}), (2, {"expert": 2})],
    ],
    ids=[
        "expert",
        "expert and data",
        "tensor",
        "pipeline",
        "virtual",
        "data",
        "optimizer sharding",
    ],
)
def test_the_same_bytes_and_the_same_next_steps(
    tmp_path: Path, chain: list[tuple[int, dict[str, Any]]]
) -> None:
    """Every stored tensor, optimizer state included, and the losses of the next steps."""
    folders = [tmp_path / str(i) for i in range(len(chain) + 1)]
    losses: list[list[float]] = []
    at = 0
    while at < len(chain):  # as many in one call as have the same number of ranks
        world, end = chain[at][0], at
        while end < len(chain) and chain[end][0] == world:
            end += 1
        layouts = [{"bf16": False, **kw} for _, kw in chain[at:end]]
        ranks = run_distributed(_through, world, folders[at : end + 1], 2, layouts)
        for each in zip(*ranks, strict=True):
            losses.append([sum(parts) for parts in zip(*each, strict=True)])
        at = end
    first, *others = (stored(folder / "step_00000003") for folder in folders[1:])
    assert any(name.startswith("optimizer.state.exp_avg.") for name in first)
    for other in others:
        assert_equal(first, other)
    assert len(losses) == len(chain)
    for loss in losses[1:]:
        assert loss == pytest.approx(losses[0], rel=1e-6)


def _save_alone(folder: Path) -> list[tuple[float, float]]:
    engine, groups = build()
    train(engine, groups, 0, 2)
    save(checkpointer(folder, groups), 2, engine)
    return train(engine, groups, 2, 4)


def _continue_as_two(folder: Path) -> tuple[list[tuple[float, float]], list[str]]:
    engine, groups = build(seed=7)
    checkpoints = checkpointer(folder, groups)
    lines = record()
    load(checkpoints, checkpoints.newest(), engine)
    return train(engine, groups, 2, 4), lines


@pytest.mark.dist
def test_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    """In bf16 too; random states are not restored, and that is said once."""
    alone = run_distributed(_save_alone, 1, tmp_path)[0]
    (first, lines), (second, silent) = run_distributed(_continue_as_two, 2, tmp_path)
    assert len(lines) == 1 and "random states of 1 rank:" in lines[0]
    assert silent == []
    for (whole, norm), (a, _), (b, other) in zip(alone, first, second, strict=True):
        assert whole == pytest.approx(a + b, rel=1e-3)
        assert norm == pytest.approx(other, rel=2e-2)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (2, 3, 4), (3, 1, 2, 2)])
def test_boxes_cover_a_range_in_order(shape: tuple[int, ...]) -> None:
    from phalanx.parallel.checkpoint.optimizer_state import rectangles

    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            boxes = rectangles(shape, start, stop)
            assert len(boxes) <= max(1, 2 * len(shape) - 1)
            parts = [
                whole[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
                for offset, size in boxes
            ]
            found = [i for part in parts for i in part.flatten().tolist()]
            assert found == list(range(start, stop))
