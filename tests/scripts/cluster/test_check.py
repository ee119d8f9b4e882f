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
from typing import NamedTuple

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = "scripts/check_cluster.py"
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "PHALANX_NODE_GPUS": "2", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.dist


def start(words: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    err: str


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[Ended]:
    try:
        said = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(p.returncode, *texts) for p, texts in zip(processes, said, strict=True)]


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def two_torchruns(*words: str) -> list[subprocess.Popen[str]]:
    """Launchers of two nodes of two ranks."""
    where = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    launch = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *where]
    return [start([*launch, "--node-rank", str(node), SCRIPT, *words]) for node in (0, 1)]


def ranks(numbers: Sequence[int], *words: str, world: int = 4) -> list[subprocess.Popen[str]]:
    """Ranks without a launcher, as srun starts them."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world)}
    return [
        start(
            [SCRIPT, *words],
            **meeting,
            RANK=str(rank),
            LOCAL_RANK=str(rank % 2),
            LOCAL_WORLD_SIZE="2",
        )
        for rank in numbers
    ]


def test_two_torchruns_are_fine_and_have_all_results(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    first, second = ended(two_torchruns("--json", str(path)))
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "fine: 4 ranks, nothing below expectation" in first.out and second.out == ""
    lines = first.out.splitlines()
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


def test_a_slow_rank_is_named_and_all_ranks_say_so() -> None:
    processes = ended(ranks(range(4), "--inject", "slow:rank2"))
    assert [process.code for process in processes] == [1] * 4
    line = r"\n  rank 2 \(\S+\) is slow: \S+ TFLOP/s, where the median is \S+\n"
    assert re.search(line, processes[0].out.partition("below expectation")[2])
    assert [process.out for process in processes[1:]] == [""] * 3


def test_a_hanging_rank_is_named_and_both_torchruns_end() -> None:
    first, second = ended(two_torchruns("--inject", "hang:rank3", "--timeout", "15"))
    assert (first.code, second.code) == (1, 1)
    said = first.err + second.err
    host = re.escape(socket.gethostname())
    assert re.search(
        rf"error: rank 3 \({host}, pid \d+\) hangs, \S+ s in rehearsal of a hang", said
    )


@pytest.mark.slow
def test_a_killed_rank_is_named() -> None:
    processes = ranks(range(4), "--inject", "hang:rank3", "--timeout", "60")
    # It has met the others when it hangs, and they wait for it in the process group.
    until = time.monotonic() + 60
    while time.monotonic() < until and not _watched(processes[3]):
        time.sleep(0.1)
    processes[3].send_signal(signal.SIGKILL)
    *others, last = ended(processes)
    assert last.code == -signal.SIGKILL and [other.code for other in others] == [45] * 3
    assert sum("error: rank 3 (" in other.err and "died" in other.err for other in others) == 1


def _watched(process: subprocess.Popen[str]) -> bool:
    """Return whether a rank has started its watchdog: its guard is connected to rank 0's."""
    guards = psutil.Process(process.pid).children()
    return any(c.status == "ESTABLISHED" for guard in guards for c in guard.net_connections())


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named() -> None:
    processes = ended(ranks([0, 1, 3], "--timeout", "20"))
    assert [process.code for process in processes] == [2] * 3
    assert processes[0].err == (
        "error: rank 2, on node 1 of the launch counted from 0, did not come within 20 s; here are "
        f"the ranks of {socket.gethostname()} (0-1, 3)\n"
    )
    assert [process.err for process in processes[1:]] == ["", ""]


def test_a_missing_rank_0_is_named() -> None:
    (process,) = ended(ranks([2], "--timeout", "3"))
    assert process.code == 2 and "rank 2 on " in process.err
    assert "cannot reach rank 0 at 127.0.0.1:" in process.err and process.err.count("\n") == 1


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    (process,) = ended([start([SCRIPT, "--json", str(tmp_path / "none" / "check.json")])])
    assert process.code == 2 and "fine: 1 rank," in process.out
    assert process.err.startswith("error: --json: cannot write ") and "none" in process.err
