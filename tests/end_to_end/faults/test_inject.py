"""The rehearsals of docs/operations.md, by run.inject: each fault happens once in a run."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from phalanx.moe.run.faults import FOLDER
from phalanx.scripts import convert_hf
from tests.scripts.test_convert_hf import qwen3
from tests.support.runs import SMALL, TINY, records, run
from tests.support.scheduling import mostly_slow
from tests.support.torchrun import Torchrun

pytestmark = pytest.mark.dist

COMMAND = [*TINY, "data=synthetic", "run.steps=6"]


def where(folder: Path, fault: str) -> str:
    """Host and process of a fault, as reported."""
    (line,) = (folder / "run" / FOLDER / fault).read_text().splitlines()
    actual = json.loads(line)
    return f"({actual['host']}, pid {actual['pid']})"


def losses(folder: Path) -> list[tuple[int, str]]:
    """(step, loss) to the last bit."""
    return [(r["step"], r["loss"].hex()) for r in records(folder / "run")]


def happened(folder: Path) -> list[str]:
    return sorted(os.listdir(folder / "run" / FOLDER))


def test_a_bad_step_is_rolled_back_once(tmp_path: Path) -> None:
    """Step 4 is bad on a rank, and is not when reached again, nor after a resume to before it."""
    args = [*COMMAND, f"run.dir={tmp_path}", "run.bad_steps=rollback", "run.save_interval=3"]
    main, other = run(2, [*args, "run.inject=nan@4:rank1"])
    assert main.code == other.code == 0
    assert "-- warning: faults are injected (run.inject): to come nan@4:rank1\n" in main.out
    (line,) = (tmp_path / "run" / FOLDER / "nan@4:rank1").read_text().splitlines()
    assert json.loads(line)["rank"] == 1
    assert main.out.count("-- rolled back to ") == 1 and "rollbacks 1" in main.out
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    repeated = [f"run.resume={tmp_path / 'run/checkpoints/step_00000003'}", "run.bad_steps=stop"]
    repeated += ["run.start_over=from-3"]
    main, _ = run(2, [*args, *repeated, "run.inject=nan@4:rank1,term@5:rank1"])
    assert main.code == 0 and "stopping after step 5: a signal asked for it" in main.out
    folder = tmp_path / "run" / FOLDER
    assert (
        "injected (run.inject): to come term@5:rank1; happened already nan@4:rank1 "
        f"(delete {folder} to repeat them)\n"
    ) in main.out
    assert happened(tmp_path) == ["nan@4:rank1", "term@5:rank1"]


def test_a_bad_step_ends_the_run(tmp_path: Path) -> None:
    """The same command then continues."""
    args = [*COMMAND, f"run.dir={tmp_path}", "run.save_interval=1", "run.inject=nan@3:rank0"]
    assert [rank.code for rank in run(2, args)] == [43, 43]
    main, _ = run(2, args)
    assert main.code == 0 and "resumed from step 2" in main.out
    assert [r["step"] for r in records(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@contextmanager
def short_window(rank: int) -> Iterator[None]:
    """Four accepted steps are enough to measure a spike by."""
    with mock.patch("phalanx.moe.run.progress.WINDOW", 8):
        yield


def test_a_spike_is_seen(tmp_path: Path) -> None:
    more = [f"run.dir={tmp_path}", "run.skip_spikes=6", "run.inject=spike@6"]
    (main,) = run(1, [*COMMAND, *more], short_window)
    assert main.code == 0, main.err
    assert main.out.count("-- skipped: the gradient norm of step 6 is ") == 1


@mostly_slow("hang", [(), ("hang@27:rank0",)], ())
def test_a_killed_rank_does_not_kill_itself_again(hang: tuple[str, ...], tmp_path: Path) -> None:
    """Nor does another hang again: torchrun starts the job anew after each, from its newest
    checkpoint, though the command says from scratch, and it ends as if nothing had been."""
    # A guard hears of its rank every 0.4 s: the rank is killed so late that it was in a step then.
    command = [*COMMAND, "run.steps=32", "run.save_interval=8", "parallel.timeout=8"]
    command += ["run.bad_steps=skip", "run.resume=never"]
    faults = ["nan@3:rank1", "kill@22:rank1", *hang]
    script = ["train.py", *command, f"run.dir={tmp_path}", f"run.inject={','.join(faults)}"]
    with Torchrun(2, script, tmp_path / "out", ["--max-restarts", "2"]) as launch:
        code, out, err = launch.wait(), launch.out(), launch.err()
    assert code == 0, err
    assert happened(tmp_path) == sorted(faults)
    killed = where(tmp_path, "kill@22:rank1")
    assert f"rank 1 {killed} died; it was last heard of in step " in err
    for fault in hang:
        assert f"rank 0 {where(tmp_path, fault)} hangs, " in err
    starts = 1 + len(hang)
    assert out.count("from scratch (run.resume=never)") == 1
    earlier = "-- run.resume=never: an earlier launch has started this run, which goes"
    assert out.count(earlier) == starts
    assert out.count(f": {tmp_path}/run/checkpoints/step_") == starts
    assert not list(tmp_path.glob("run/checkpoints/*.old"))
    assert out.count("-- skipped: ") == 1 and "done: step 32" in out
    straight = [*command, f"run.dir={tmp_path / 'straight'}", "run.inject=nan@3:rank1"]
    assert run(2, straight)[0].code == 0
    assert losses(tmp_path) == losses(tmp_path / "straight")


@pytest.mark.slow
def test_torchrun_neither_imports_again_nor_starts_over_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first launch sets the checkpoint of an earlier start aside; what it saves, the second
    goes on from."""
    folder, weights = tmp_path / "run", tmp_path / "weights"
    assert convert_hf.main(["import", str(qwen3(tmp_path / "theirs")), str(weights)]) == 0
    *model, resume = capsys.readouterr().out.split("train.py ")[1].splitlines()[0].split()
    command = [*SMALL[:2], *SMALL[8:], *model, "data=synthetic", f"run.dir={tmp_path}"]
    assert run(2, [*command, "run.steps=2"])[0].code == 0
    command += ["run.save_interval=3", "run.steps=8", resume, "run.start_over=imported"]
    script = ["train.py", *command, "run.inject=kill@5:rank1"]
    with Torchrun(2, script, tmp_path / "out", ["--max-restarts", "1"]) as launch:
        code, out, err = launch.wait(), launch.out(), launch.err()
    assert code == 0, err
    assert out.count(f"from the weights of {weights}") == 1
    assert out.count(f": {folder}/checkpoints/step_00000003") == 1
    assert err.count("is of an earlier start: renamed to step_00000002.old") == 1
    assert [r["step"] for r in records(folder)] == list(range(1, 9))


@pytest.mark.slow
def test_an_error_is_told_with_its_rank(tmp_path: Path) -> None:
    args = [*COMMAND, f"run.dir={tmp_path}", "run.inject=raise@2"]
    ranks = run(2, args)
    assert [rank.code for rank in ranks] == [1, 1]
    assert "Injected: run.inject=raise@2" in ranks[0].err
