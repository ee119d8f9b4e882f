"""Which checkpoints of a run are kept, and when those that go are deleted."""

from pathlib import Path
from typing import Any

import pytest

from phalanx.configs.schema import RunConfig
from phalanx.parallel.checkpoint.saved_config import CheckpointError
from tests.parallel.checkpoint.checkpoints import build, checkpointer, load, save, train
from tests.support.distributed import RankFailed, run_distributed


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _keeps(folder: Path) -> list[list[str]]:
    engine, groups = build()
    checkpoints = checkpointer(folder, groups, keep_last=2)
    seen = []
    for step in (1, 2, 3):
        save(checkpoints, step, engine)
    path = save(checkpoints, 3, engine)
    stamp = (path / "COMMIT.json").stat().st_mtime_ns
    assert save(checkpoints, 3, engine) == path
    assert (path / "COMMIT.json").stat().st_mtime_ns == stamp  # a step is saved once
    seen.append(names(folder))
    other = checkpointer(folder, groups, keep_last=2)  # does not know of them
    with pytest.raises(CheckpointError, match="step_00000003 was not there when this run started"):
        save(other, 1, engine)
    seen.append(names(folder))
    again = started_over(folder, groups, "a")
    save(again, 1, engine)
    seen.append(names(folder))
    save(again, 2, engine)
    back = started_over(folder, groups, "b", resume=str(folder / "step_00000001"))
    seen.append(names(folder))
    load(back, folder / "step_00000001", engine)
    save(back, 3, engine)
    seen.append(names(folder))
    return seen


def started_over(folder: Path, groups: Any, word: str, resume: str = "never") -> Any:
    checkpoints = checkpointer(folder, groups, keep_last=2)
    begin = checkpoints.start(RunConfig(resume=resume, start_over=word))
    checkpoints.started(begin)
    assert begin.over and not checkpointer(folder, groups).start(RunConfig(start_over=word)).over
    return checkpoints


@pytest.mark.dist
def test_keeps_the_newest_and_sets_an_earlier_run_aside(tmp_path: Path) -> None:
    kept, refused, restarted, back, resumed = run_distributed(_keeps, 1, tmp_path)[0]
    assert kept == refused == ["step_00000002", "step_00000003"]
    old = ["step_00000002.old", "step_00000003.old"]
    assert restarted == ["START.json", "step_00000001", *old]
    assert back == ["START.json", "step_00000001", *old[:1], "step_00000002.old2", *old[1:]]
    assert resumed == ["START.json", "step_00000001", "step_00000002.old2", "step_00000003"]


def _keeps_every(folder: Path, async_save: bool) -> list[str]:
    engine, groups = build()
    checkpoints = checkpointer(folder, groups, keep_last=1, keep_every=3, async_save=async_save)
    for step in range(1, 9):
        save(checkpoints, step, engine)
    checkpoints.close()
    resumed = checkpointer(folder, groups, keep_last=1, keep_every=3, async_save=async_save)
    path = resumed.newest()
    assert path == folder / "step_00000008"
    load(resumed, path, engine)
    save(resumed, 10, engine)
    resumed.close()
    return names(folder)


@pytest.mark.dist
@pytest.mark.parametrize("async_save", [False, True])
def test_multiples_are_kept_for_good(tmp_path: Path, async_save: bool) -> None:
    (left,) = run_distributed(_keeps_every, 1, tmp_path, async_save)
    assert left == ["step_00000003", "step_00000006", "step_00000010"]


def _restarts_twice(folder: Path) -> None:
    from phalanx.parallel.checkpoint import commit

    engine, groups = build()
    train(engine, groups, 0, 1)
    save(checkpointer(folder, groups), 5, engine)
    save(started_over(folder, groups, "a"), 1, engine)
    assert names(folder) == ["START.json", "step_00000001", "step_00000005.old"]

    def full(*args: object) -> None:
        raise OSError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit, "commit", full)
        with pytest.raises(RuntimeError, match="no space left"):
            save(started_over(folder, groups, "b"), 1, engine)
    assert names(folder) == ["START.json", "step_00000001.old", "step_00000005.old"]
    save(checkpointer(folder, groups), 1, engine)
    assert names(folder) == ["START.json", "step_00000001"]


@pytest.mark.dist
def test_nothing_is_deleted_before_there_is_another(tmp_path: Path) -> None:
    """Runs that start over in one folder: what is there goes once the first save is committed."""
    run_distributed(_restarts_twice, 1, tmp_path)


def _without_any(folder: Path) -> None:
    _, groups = build()
    checkpointer(folder, groups, keep_last=0)


@pytest.mark.dist
def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="run.keep_last=0"):
        run_distributed(_without_any, 1, tmp_path)
