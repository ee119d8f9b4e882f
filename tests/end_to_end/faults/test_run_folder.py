"""One run at a time in a run folder."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

from phalanx.parallel import folder_lock
from phalanx.scripts import checkpoint
from tests.end_to_end.test_object_stores import reached
from tests.parallel.test_folder_lock import distant
from tests.support import s3
from tests.support.launch import Launch
from tests.support.runs import TINY, before_step, exact, records, run

pytestmark = pytest.mark.dist

COMMAND = [*TINY, "data=synthetic"]


def test_a_second_run_is_refused_and_a_killed_one_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [*COMMAND, f"run.dir={tmp_path}", "run.save_interval=5", "run.steps=100000"]
    with Launch(1, command, tmp_path / "out") as launch:
        launch.until((folder / "checkpoints/step_00000005").exists)
        ranks = run(2, command)
        assert [rank.code for rank in ranks] == [2, 2]
        (line,) = (ranks[0].err + ranks[1].err).splitlines()
        assert line.startswith(f"error: {folder} is in use by a run that lives (host ")
        assert f"{socket.gethostname()}, pid {launch.pid(0)}, since 2" in line
        assert "run.name" in line and not list(folder.glob("failures"))
        reached = len(records(folder))
        launch.until(lambda: len(records(folder)) > reached)
        os.kill(launch.pid(0), signal.SIGKILL)
        launch.wait()
    steps = [step for step, *_ in exact(records(folder))]
    assert steps == list(range(1, len(steps) + 1))
    began = time.monotonic()
    (rank,) = run(1, [*command, f"run.steps={len(steps) + 10}"])
    assert rank.code == 0 and "resumed from step" in rank.out and "waiting" not in rank.out
    assert time.monotonic() - began < folder_lock.DEAD
    assert len(records(folder)) == len(steps) + 10 and not list(folder.glob(f"{folder_lock.NAME}*"))


@contextmanager
def on_its_own_disk(rank: int, folder: Path) -> Iterator[None]:
    """Rank 1 as the first of another host, which has a different folder of the same name."""
    before = Path.cwd()
    late = mock.patch("phalanx.parallel.run_folder._SEEN", 0.3)
    with late, mock.patch.dict(os.environ, LOCAL_RANK="0"):
        os.chdir(folder / str(rank))
        try:
            yield
        finally:
            os.chdir(before)


def test_a_folder_that_hosts_do_not_share_is_told_at_the_start(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    change = partial(on_its_own_disk, folder=tmp_path)
    ranks = run(2, [*COMMAND, "run.dir=runs"], change)
    assert [rank.code for rank in ranks] == [2, 2]
    (line,) = (ranks[0].err + ranks[1].err).splitlines()
    assert line.startswith(f"error: {tmp_path}/1/runs/run on {socket.gethostname()} is not the ")
    assert "run.dir that all hosts share" in line and "run.checkpoints (rank 1)" in line
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    # Nothing of a run that saves nothing has to be there.
    ranks = run(2, [*COMMAND, "run.dir=runs", "run.steps=1", "run.save_interval=-1"], change)
    assert [rank.code for rank in ranks] == [0, 0]


@pytest.mark.extras
def test_a_launch_that_is_refused_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """The store cannot be written, which is an error; the run folder does not change."""
    command = [*COMMAND, f"run.dir={tmp_path}", "run.steps=2"]
    assert run(1, command)[0].code == 0
    folder = tmp_path / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    refused = {
        "run.checkpoints=s3://no-such-bucket/runs": "the bucket does not exist",
        "model.layers=3": "not configured as its checkpoint",
        "optim=muon": "go on with optim.kind=adamw",
        "run.resume=nowhere": "has started from scratch and has checkpoints",
    }
    for override, why in refused.items():
        (main,) = run(1, [*command, "run.steps=4", override], partial(reached, s3.endpoint()))
        assert main.code == 2 and why in main.err, main.err
        assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert checkpoint.main(["list", str(folder)]) == 0


def taken_over(path: Path) -> None:
    """A `Change` that suspends a run for long."""
    os.replace(folder_lock._written(path, distant()), path)
    folder_lock.BEAT = 0.0


def suspended(rank: int, *, path: Path) -> AbstractContextManager[None]:
    return before_step(3, partial(taken_over, path))


def test_a_run_that_was_taken_over_writes_nothing_more(tmp_path: Path) -> None:
    path = tmp_path / "run" / folder_lock.NAME
    command = [*COMMAND, f"run.dir={tmp_path}", "run.save_interval=3", "run.steps=6"]
    with Launch(1, command, tmp_path / "out", partial(suspended, path=path)) as launch:
        assert launch.wait() == [2], launch.output(0)
    (line,) = [line for line in launch.output(0).splitlines() if line.startswith("error: ")]
    assert "has lost" in line and "host node7, pid 4711" in line
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2]
    assert not list((tmp_path / "run/checkpoints").glob("step_*"))
    assert b"node7" in path.read_bytes()
