"""A rank that stops, dies, hangs or raises: who is named, how soon, and what is left behind.

One second of slack is added to the second that is promised: two cores run the ranks and this.
"""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core.distributed  # noqa: F401  (imported once for all ranks, which are forked)
import megatron.core.models.gpt.gpt_model  # noqa: F401
import psutil
import pytest

from parallel.watchdog import LOST
from tests.launch import Launch, at_step
from tests.runs import SMALL, before_step, exact, records, run
from tests.test_scripts import BIN, started

pytestmark = pytest.mark.dist

TIMEOUT = 3
SLACK = 1.0
TINY = [*SMALL, "model=tiny", "model.attention.head_dim=8", "data=synthetic", "run.steps=1000"]


def mark_and(act: Callable[[], Any], path: Path) -> None:
    """Leave the time, then do what goes wrong."""
    path.write_text(str(time.monotonic()))
    act()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os._exit(41)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600)


def fail() -> None:
    raise LookupError("what went wrong")


CASES = {
    "stopped": (stop, "has not answered for", -signal.SIGKILL),
    "exits": (die, "died; it was last heard of in step ", 41),
    "killed": (be_killed, "died; it was last heard of in step ", -signal.SIGKILL),
    "hangs": (hang, "hangs, ", LOST),
    "raises": (fail, "LookupError: what went wrong", 1),
}


@pytest.mark.parametrize(
    ("case", "culprit"),
    [
        *[("stopped", 1), ("exits", 1), ("killed", 0), ("hangs", 1), ("raises", 1)],
        *[pytest.param(case, 0, marks=pytest.mark.slow) for case in CASES if case != "killed"],
    ],
)
def test_the_rank_at_fault_is_named_and_all_end(case: str, culprit: int, tmp_path: Path) -> None:
    act, said, code = CASES[case]
    when = tmp_path / "when"
    command = [*TINY, f"parallel.timeout={TIMEOUT}", f"run.dir={tmp_path}"]
    change = partial(at_step, only=culprit, number=3, act=partial(mark_and, act, when))
    with Launch(2, command, tmp_path / "out", change) as launch:
        codes = launch.wait(60)
        took = max(launch.ended.values()) - float(when.read_text())
    other = 1 - culprit
    assert codes[culprit] == code and codes[other] == LOST, launch.said(0) + launch.said(1)
    assert took <= TIMEOUT + 1 + SLACK
    print(f"{case}, rank {culprit}: all ended after {took:.2f} s, timeout {TIMEOUT} s")

    speaker = culprit if case == "raises" else other
    told = launch.said(speaker)
    assert said in told and f"rank {culprit}" in told
    assert sum(launch.said(rank).count("error: ") for rank in (0, 1)) == (case != "raises")
    (folder,) = (tmp_path / "run/failures").iterdir()
    stacks = {path.stem: path.read_text() for path in folder.glob("*.txt")}
    assert "moe/trainer.py" in stacks[f"rank_{other}"] and "step 3" in stacks[f"rank_{other}"]
    if case == "stopped":
        assert "its stack is unknown; it was stopped" in stacks[f"rank_{culprit}"]
    if case == "hangs":
        assert "in hang" in stacks[f"rank_{culprit}"]
    record = json.loads((folder / f"rank_{other}.collectives.json").read_bytes())
    assert "gloo:all_reduce" in {entry["profiling_name"] for entry in record["entries"]}


@contextlib.contextmanager
def wait_in_vain(rank: int, act: Callable[[], Any]) -> Iterator[None]:
    """Rank 1 goes wrong, and rank 0's wait for its tokens ends as kernel `push` would end it."""
    from moe import failure

    def trapped() -> None:
        failure.missing = lambda: "rank 1 has not reached exchange 41 of experts, only 39"
        raise RuntimeError("CUDA error: unspecified launch failure")

    with before_step(3, act if rank else trapped):
        yield


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (stop, r"rank 1 \(.*\) has not answered for "),
        (hang, "no rank goes on, .*; rank 1 has not reached exchange 41 of experts, only 39; "),
    ],
)
def test_a_wait_for_tokens_in_vain_names_the_rank_that_did_not_come(
    act: Callable[[], Any], said: str, tmp_path: Path
) -> None:
    command = [*TINY, "parallel.timeout=30", f"run.dir={tmp_path}"]
    with Launch(2, command, tmp_path / "out", partial(wait_in_vain, act=act)) as launch:
        assert launch.wait(25)[0] == LOST, launch.said(0)
    (line,) = (line for line in launch.said(0).splitlines() if line.startswith("error: "))
    assert re.search(said, line)
    (stacks,) = (tmp_path / "run/failures").glob("*/rank_0.txt")
    assert "CUDA error: unspecified launch failure" in stacks.read_text()


def test_torchrun_starts_again_from_the_newest_checkpoint(tmp_path: Path) -> None:
    command = [*TINY, "run.steps=40", "run.save_interval=5"]
    launch = [str(BIN / "torchrun"), "--nproc-per-node", "2", "--max-restarts", "2"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "train.py"]
    folder = tmp_path / "run"
    with started(*launch, *command, f"run.dir={tmp_path}") as process:
        while not (folder / "checkpoints/step_00000005").exists():
            assert process.poll() is None
            time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        (victim,) = [child for child in children if child.environ().get("RANK") == "1"]
        victim.kill()
        out, err = process.communicate()
    assert process.returncode == 0, err
    assert f"rank 1 ({socket.gethostname()}, pid {victim.pid}) died" in err
    assert out.count("from scratch (no checkpoint in the run folder)") == 1
    assert out.count(f"from {folder}/checkpoints/step_") == 1
    assert run(2, [*command, f"run.dir={tmp_path / 'straight'}"])[0].code == 0
    assert exact(records(folder)) == exact(records(tmp_path / "straight/run"))
