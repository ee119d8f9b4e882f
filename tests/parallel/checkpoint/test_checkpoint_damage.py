"""Damaged checkpoints: found, told by name, set aside; the one before is used, or the run ends."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.checkpoint.checkpoints import build, checkpointer, find_newest, largest, load
from tests.support.distributed import RankFailed, run_distributed
from tests.support.runs import TINY, announced, exact, records
from tests.support.runs import run as train_run
from tests.support.scheduling import mostly_slow


def flip(folder: Path) -> str:
    path = largest(folder)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path.name


def truncate(folder: Path) -> str:
    path = largest(folder)
    os.truncate(path, path.stat().st_size - 1)
    return path.name


def delete_shard(folder: Path) -> str:
    path = largest(folder)
    path.unlink()
    return path.name


def delete_metadata(folder: Path) -> str:
    (folder / ".metadata").unlink()
    return ".metadata"


def delete_commit(folder: Path) -> str:
    (folder / "COMMIT.json").unlink()
    return "COMMIT.json is missing"


def edit_commit(folder: Path) -> str:
    path = folder / "COMMIT.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    return "COMMIT.json was changed"


def garble_commit(folder: Path) -> str:
    (folder / "COMMIT.json").write_bytes(b"{\x00")
    return "COMMIT.json is not readable"


def empty(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return "COMMIT.json is missing"


DAMAGES = [flip, truncate, delete_shard, delete_metadata]
DAMAGES += [delete_commit, edit_commit, garble_commit, empty]


@pytest.mark.dist
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_the_checkpoint_before_is_used(run: Path, damage: Any) -> None:
    told = damage(run / "step_00000002")
    name, lines = run_distributed(find_newest, 1, run)[0]
    assert name == "step_00000001"
    assert len(lines) == 1 and told in lines[0] and "step_00000002.bad" in lines[0]
    assert sorted(path.name for path in run.iterdir()) == ["step_00000001", "step_00000002.bad"]


@pytest.mark.dist
def test_ranks_share_the_verification(run: Path) -> None:
    told = flip(run / "step_00000002")
    (name, lines), (other, silent) = run_distributed(find_newest, 2, run)
    assert name == other == "step_00000001"
    assert told in lines[0] and silent == []


@pytest.mark.dist
def test_no_valid_checkpoint_is_an_error_every_time(run: Path) -> None:
    """Also at the second start, when all of them were renamed by the first."""
    flip(run / "step_00000001")
    delete_commit(run / "step_00000002")
    for _ in range(2):
        with pytest.raises(RankFailed, match="NoneValid.*run.start_over=.* run.resume=never"):
            run_distributed(find_newest, 1, run)


@pytest.mark.dist
def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert run_distributed(find_newest, 1, tmp_path / "new") == [(None, [])]


@pytest.mark.dist
def test_what_is_ignored_is_told(run: Path) -> None:
    (run / "step_00000001").rename(run / "step_00000001.tmp")
    (run / "step_00000002").rename(run / "step_00000002.old")
    ((name, lines),) = run_distributed(find_newest, 1, run)
    assert name is None
    assert "step_00000001.tmp was never completed" in lines[0]
    assert "step_00000002.old is of an earlier run" in lines[1] and len(lines) == 2


def _load_from(path: Path, folder: Path) -> None:
    engine, groups = build()
    load(checkpointer(folder, groups), path, engine)


@pytest.mark.dist
def test_a_named_checkpoint_has_to_be_valid_and_is_not_renamed(run: Path, tmp_path: Path) -> None:
    told = truncate(run / "step_00000002")
    with pytest.raises(RankFailed, match=rf"NoUsableCheckpoint.*{told}"):
        run_distributed(_load_from, 1, run / "step_00000002", tmp_path / "other")
    assert (run / "step_00000002").exists()
    with pytest.raises(RankFailed, match=r"did you mean run.resume=.*step_00000002"):
        run_distributed(_load_from, 1, run, tmp_path / "other")


COMMAND = [*TINY, "data=synthetic", "run.save_interval=1"]


@pytest.mark.dist
@mostly_slow("damage", [flip, empty], flip)
def test_a_run_falls_back_bit_for_bit_or_ends_with_44(tmp_path: Path, damage: Any) -> None:
    command = [*COMMAND, f"run.dir={tmp_path}", "run.steps=4"]
    assert train_run(1, [*command[:-1], "run.steps=3"])[0].code == 0
    folder = tmp_path / "run/checkpoints"
    damage(folder / "step_00000003")
    (main,) = train_run(1, command)
    assert main.code == 0 and "resumed from step 2: " in main.out
    losses = exact(records(tmp_path / "run"))
    assert [step for step, *_ in losses] == [1, 2, 3, 4]
    for path in folder.glob("step_0000000?"):
        damage(path)
    for _ in range(2):  # also when all were renamed by the start before
        (main,) = train_run(1, [*command[:-1], "run.steps=5"])
        assert main.code == 44 and announced(main.out)
        errors = [line for line in main.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "run.resume=never" in errors[0]
    assert not list(folder.glob("step_0000000?"))
    assert exact(records(tmp_path / "run")) == losses  # nothing started from zero
