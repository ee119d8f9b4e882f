"""Saves that fail or are killed leave the checkpoints before them intact, and the run goes on."""

import errno
import importlib
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.parallel.checkpoint.checkpoints import build, checkpointer, load, save, train
from tests.parallel.surroundings import full_disk
from tests.support.distributed import RankFailed, run_distributed
from tests.support.scheduling import slow


def _fails_on_full_disk(folder: Path, victim: int, async_save: bool) -> list[str]:
    engine, groups = build(expert=2)
    checkpoints = checkpointer(folder, groups, async_save=async_save)
    train(engine, groups, 0, 1)
    save(checkpoints, 1, engine)
    checkpoints.close()
    train(engine, groups, 1, 2)
    messages = []
    try:
        with full_disk(20_000) if dist.get_rank() == victim else nullcontext():
            save(checkpoints, 2, engine)
            checkpoints.close()
    except RuntimeError as error:
        messages.append(str(error))
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["step_00000001"], left
    assert checkpoints.newest() == folder / "step_00000001"
    save(checkpoints, 2, engine)  # there is space again
    checkpoints.close()
    assert checkpoints.newest() == folder / "step_00000002"
    return messages


@pytest.mark.dist
@pytest.mark.parametrize(("victim", "async_save"), [(1, False), (1, True), *slow((0, False))])
def test_full_disk(tmp_path: Path, victim: int, async_save: bool) -> None:
    """One line on every rank, the checkpoint before intact, nothing half-written left."""
    messages = run_distributed(_fails_on_full_disk, 2, tmp_path, victim, async_save)
    assert messages[0] == messages[1] and len(messages[0]) == 1
    assert os.strerror(errno.EFBIG) in messages[0][0] and "\n" not in messages[0][0]
    assert str(tmp_path) in messages[0][0] and "run.dir" in messages[0][0]
    assert "; earlier checkpoints are intact, the newest is of step 1 (" in messages[0][0]


def _fails_on_metadata(folder: Path, name: str) -> str:
    from megatron.core.dist_checkpointing import serialization
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    def full(*args: Any, **kw: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine, groups = build()
    checkpoints = checkpointer(folder, groups)
    target = FileSystemWriterAsync if name == "finish" else serialization
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        patch.setattr(target, name, full)
        save(checkpoints, 1, engine)
    dist.barrier()
    assert not list(folder.iterdir())
    assert "; there is no earlier checkpoint (" in str(caught.value)
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["finish", "save_config"])
def test_rank_0_failing_alone_does_not_hang_the_others(tmp_path: Path, name: str) -> None:
    first, second = run_distributed(_fails_on_metadata, 2, tmp_path, name)
    assert first == second and os.strerror(errno.ENOSPC) in first


PHASES = {
    "no shard is written": ("phalanx.parallel.checkpoint.writer", "_write"),
    "a shard is written in part": ("phalanx.parallel.checkpoint.writer", "_write_item"),
    "shards are not all known": ("phalanx.parallel.checkpoint.writer", "gather"),
    "no COMMIT.json": ("phalanx.parallel.checkpoint.commit", "_seal"),
    "not renamed": ("phalanx.parallel.checkpoint.commit", "os.replace"),
    "older one not removed": ("phalanx.parallel.checkpoint.commit", "remove"),
}
EARLY = ("no shard is written", "shards are not all known")
"""Phases that leave what others leave too."""


def _killed(folder: Path, module: str, name: str, async_save: bool) -> None:

    engine, groups = build()
    checkpoints = checkpointer(folder, groups, keep_last=1, async_save=async_save)
    train(engine, groups, 0, 1)
    save(checkpoints, 1, engine)
    checkpoints.close()
    train(engine, groups, 1, 2)
    target = importlib.import_module(module)
    for part in name.split(".")[:-1]:
        target = getattr(target, part)
    original, calls = getattr(target, name.split(".")[-1]), []

    def die(*args: Any, **kw: Any) -> Any:
        calls.append(args)
        if name == "remove" and not any(path.name == "step_00000001" for path in args[0]):
            return None
        if name == "_write_item" and len(calls) < 5:
            return original(*args, **kw)
        os._exit(9)

    setattr(target, name.split(".")[-1], die)
    save(checkpoints, 2, engine)
    checkpoints.close()


def _continue(folder: Path) -> tuple[str, list[tuple[float, float]]]:
    engine, groups = build(seed=5)
    checkpoints = checkpointer(folder, groups, keep_last=1)
    path = checkpoints.newest()
    step = load(checkpoints, path, engine)["step"]
    losses = train(engine, groups, step, 3)
    save(checkpoints, 3, engine)
    assert [p.name for p in folder.iterdir()] == ["step_00000003"]
    return path.name, losses


@pytest.mark.dist
@pytest.mark.parametrize(
    ("phase", "async_save"),
    [
        *((phase, False) for phase in PHASES if phase not in EARLY),
        ("older one not removed", True),
        *slow(*((phase, False) for phase in EARLY), ("not renamed", True)),
    ],
)
def test_killed_while_saving(
    tmp_path: Path, phase: str, async_save: bool, expected: list[tuple[float, float]]
) -> None:
    """The run goes on from the newest complete checkpoint, bit for bit, and clears what is left."""
    with pytest.raises(RankFailed, match="exit code 9"):
        run_distributed(_killed, 1, tmp_path, *PHASES[phase], async_save)
    name, losses = run_distributed(_continue, 1, tmp_path)[0]
    step = 2 if phase == "older one not removed" else 1
    assert name == f"step_{step:08d}"
    assert losses == expected[step:]
