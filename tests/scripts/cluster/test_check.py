"""scripts/check_cluster.py as a job starts it: torchruns on this machine, and ranks by themselves.

Launchers and ranks are processes of their own. Two nodes are pretended by PHALANX_NODE_GPUS.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.launch import free_port
from tests.support.torchrun import ROOT, Program, Torchrun

SCRIPT = "scripts/check_cluster.py"
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "PHALANX_NODE_GPUS": "2", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.dist


def two_torchruns(folder: Path, *words: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of the launchers of two nodes of two ranks."""
    where = ["--nnodes", "2", "--rdzv-backend", "static"]
    where += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    first, second = (
        Torchrun(
            *(2, [SCRIPT, *words], folder / str(node), [*where, "--node-rank", str(node)]),
            environment=ENVIRONMENT,
        )
        for node in (0, 1)
    )
    with first, second:
        return [(launch.wait(), launch.out(), launch.err()) for launch in (first, second)]


def ranks(
    folder: Path, numbers: Sequence[int], *words: str, world: int = 4, script: str = SCRIPT
) -> list[Program]:
    """Ranks without a launcher, as srun starts them."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meeting["WORLD_SIZE"] = str(world)
    return [
        Program(
            [script, *words],
            folder / str(rank),
            ENVIRONMENT
            | meeting
            | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"},
        )
        for rank in numbers
    ]


def test_two_torchruns_are_fine_and_have_all_results(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    (code, out, err), other = two_torchruns(tmp_path, "--json", str(path))
    assert code == other[0] == 0, err + other[2]
    assert "fine: 4 ranks, nothing below expectation" in out and other[1] == ""
    lines = out.splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [
        [str(rank), socket.gethostname(), str(rank // 2)] for rank in range(4)
    ]
    values = json.loads(path.read_text())
    assert values["exit_code"] == 0 and values["findings"] == []
    assert [rank["node"] for rank in values["ranks"]] == ["0", "0", "1", "1"]
    assert all(rank["tflops"] > 0 and rank["node_gbs"] > 0 for rank in values["ranks"])
    assert values["all_reduce_gbs"] > 0 and values["expected"]["network_gbs"] is None
    (rail,) = values["rails"]
    assert rail["nodes"] == ["0", "1"] and rail["gbs"] > 0
    assert rail["ranks"] in ([0, 2], [1, 3])


def test_a_slow_rank_is_named_and_all_ranks_say_so(tmp_path: Path) -> None:
    processes = ranks(tmp_path, range(4), "--inject", "slow:rank2")
    assert [process.wait() for process in processes] == [1] * 4
    line = r"\n  rank 2 \(\S+\) is slow: \S+ TFLOP/s, where the median is \S+\n"
    assert re.search(line, processes[0].out().partition("below expectation")[2])
    assert [process.out() for process in processes[1:]] == [""] * 3


@pytest.mark.slow
def test_a_hanging_rank_is_named_and_both_torchruns_end(tmp_path: Path) -> None:
    first, second = two_torchruns(tmp_path, "--inject", "hang:rank3", "--timeout", "8")
    assert first[0] == second[0] == 1
    said = first[2] + second[2]
    host = re.escape(socket.gethostname())
    assert re.search(
        rf"error: rank 3 \({host}, pid \d+\) hangs, \S+ s in rehearsal of a hang", said
    )


_ENDING = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from phalanx.scripts import check_cluster
import torch.distributed as dist

def destroy_process_group():  # of NCCL, which waits for a rank that dies
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)

if {dies}:
    dist.destroy_process_group = destroy_process_group
code = check_cluster.main()
assert not dist.is_initialized()
sys.exit(code)
"""


@pytest.mark.alone  # a rank that waits for its turn on this machine is slow
@pytest.mark.parametrize(("dies", "codes"), [(False, [0, 0]), (True, [45, -signal.SIGKILL])])
def test_groups_end_and_a_rank_that_dies_there_is_named(
    dies: bool, codes: list[int], tmp_path: Path
) -> None:
    script = tmp_path / "ending.py"
    script.write_text(_ENDING.format(root=str(ROOT), dies=dies))
    processes = ranks(tmp_path, range(2), world=2, script=str(script))
    assert [process.wait() for process in processes] == codes
    assert "fine: 2 ranks" in processes[0].out()
    named = re.search(r"error: rank 1 \(\S+, pid \d+\) died", processes[0].err())
    assert bool(named) == dies


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    processes = ranks(tmp_path, range(4), "--inject", "hang:rank3", "--timeout", "60")
    # It has met the others when it hangs, and they wait for it in the process group.
    until = time.monotonic() + 60
    while time.monotonic() < until and not _watched(processes[3]):
        time.sleep(0.1)
    os.kill(processes[3].pid, signal.SIGKILL)
    assert [process.wait() for process in processes] == [45] * 3 + [-signal.SIGKILL]
    errors = [process.err() for process in processes[:3]]
    assert sum("error: rank 3 (" in error and "died" in error for error in errors) == 1


def _watched(process: Program) -> bool:
    """Return whether a rank has started its watchdog: its guard is connected to rank 0's."""
    guards = psutil.Process(process.pid).children()
    return any(c.status == "ESTABLISHED" for guard in guards for c in guard.net_connections())


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    processes = ranks(tmp_path, [0, 1, 3], "--timeout", "20")
    assert [process.wait() for process in processes] == [2] * 3
    assert processes[0].err() == (
        "error: rank 2, on node 1 of the launch counted from 0, did not come within 20 s; here are "
        f"the ranks of {socket.gethostname()} (0-1, 3)\n"
    )
    assert [process.err() for process in processes[1:]] == ["", ""]


def test_a_missing_rank_0_is_named(tmp_path: Path) -> None:
    (process,) = ranks(tmp_path, [2], "--timeout", "1")
    assert process.wait() == 2 and "rank 2 on " in process.err()
    assert "cannot reach rank 0 at 127.0.0.1:" in process.err()
    assert process.err().count("\n") == 1


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--json", str(tmp_path / "none" / "check.json")]
    environment = os.environ | ENVIRONMENT
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and "fine: 1 rank," in ended.stdout
    assert ended.stderr.startswith("error: --json: cannot write ") and "none" in ended.stderr
