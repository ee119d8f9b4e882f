"""Training over two nodes as a user starts it: a torchrun for each, which meet on loopback."""

import contextlib
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.moe.report.loggers import read
from tests.support.launch import free_port
from tests.support.runs import SMALL
from tests.support.torchrun import Torchrun

pytestmark = pytest.mark.dist
RUN = [
    "train.py",
    *SMALL,
    "model=tiny",
    "model.attention.head_dim=8",
    "data=synthetic",
    "data.global_batch=16",
    "parallel.expert=4",
    "parallel.dispatch=hier",
    "parallel.timeout=20",
]
NODES_OF_TWO = {"PHALANX_NODE_GPUS": "2"}


@contextlib.contextmanager
def two_torchruns(folder: Path, *overrides: str) -> Iterator[list[Torchrun]]:
    """Launchers of two ranks each, of which either may be the first node."""
    where = ["--nnodes", "2", "--rdzv-id", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command = [*RUN, f"run.dir={folder}", *overrides]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                Torchrun(2, command, folder / name, where, environment=NODES_OF_TWO)
            )
            for name in ("first", "second")
        ]


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in read(folder / "run" / "metrics.jsonl") if "loss" in step]


def test_two_torchruns_train_like_one(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    with two_torchruns(two, "run.steps=3") as nodes:
        assert [node.wait() for node in nodes] == [0, 0], nodes[0].err() + nodes[1].err()
    command = [*RUN, f"run.dir={one}", "run.steps=3"]
    with Torchrun(4, command, one / "out", environment=NODES_OF_TWO) as launch:
        assert launch.wait() == 0, launch.err()
    assert len(losses(two)) == 3 and losses(two) == losses(one)
    assert "hier" in "".join(node.out() for node in nodes)


@pytest.mark.slow
def test_a_dead_node_is_named_and_the_other_ends(tmp_path: Path) -> None:
    metrics = tmp_path / "run" / "metrics.jsonl"
    with two_torchruns(tmp_path, "run.steps=100000", "run.log_interval=1") as nodes:
        nodes[0].until(lambda: metrics.exists() and len(losses(tmp_path)) > 3)
        by_rank = {
            rank: node
            for node, name in zip(nodes, ("first", "second"), strict=True)
            for rank in range(4)
            if (tmp_path / name / f"rank_{rank}.pid").exists()
        }
        lost, left = by_rank[3], by_rank[0]
        assert by_rank == {0: left, 1: left, 2: lost, 3: lost}
        pids = {rank: lost.pid(rank) for rank in (2, 3)}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        assert left.wait() == 1
    host = re.escape(socket.gethostname())
    named = re.findall(rf"error: rank (\d) \({host}, pid (\d+)\) died; ", left.err())
    assert named and all(pids[int(rank)] == int(pid) for rank, pid in named), left.err()
