"""One-sided exchanges between two GPUs when one rank stops, or its device hangs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from moe.sinks import read
from parallel.watchdog import LOST

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 20
OVERRIDES = [
    *["model=tiny", "kernels=fused", "run.device=cuda", "run.name=run", "run.steps=100000"],
    *["run.save_interval=-1", "data=synthetic", "data.sequence_length=256", "data.micro_batch=2"],
    *["data.global_batch=8", "optim.decay_steps=1000", "parallel.expert=2"],
    *["parallel.dispatch=symm", f"parallel.timeout={TIMEOUT}"],
]
HANGING = """
import os, sys, torch, train
from contextlib import nullcontext
from parallel.symm import Symm
from tests.runs import before_step
dispatch = Symm.dispatch
def hang(*args, **how):
    torch.cuda._sleep(10**14)  # for hours
    return dispatch(*args, **how)
later = before_step(12, lambda: setattr(Symm, "dispatch", hang))
with later if os.environ["RANK"] == "1" else nullcontext():
    train._leave(train.main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _two_hoppers() -> None:
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs two Hopper GPUs")


class Ranks:
    """Two processes, as torchrun would start them; nobody ends one because of the other."""

    def __init__(self, folder: Path, program: Sequence[str], *more: str) -> None:
        command = [sys.executable, *program, *OVERRIDES, f"run.dir={folder}", *more]
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        self.folder = folder / "run"
        self.files = [folder / f"{rank}.txt" for rank in (0, 1)]
        self.ranks = []
        for rank, path in enumerate(self.files):
            env = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("w") as out:
                both = dict(stdout=out, stderr=subprocess.STDOUT)
                self.ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, **both))

    def said(self) -> str:
        return "\n".join(path.read_text()[-6000:] for path in self.files)

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return len(read(path)) if path.exists() else 0

    def until(self, seen: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < end, self.said()
            time.sleep(0.1)

    def codes(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]

    def told(self) -> list[str]:
        lines = [line for path in self.files for line in path.read_text().splitlines()]
        return [line for line in lines if line.startswith("error: ")]


@contextmanager
def launched(folder: Path, program: Sequence[str], *more: str) -> Iterator[Ranks]:
    ranks = Ranks(folder, program, *more)
    try:
        ranks.until(lambda: ranks.steps() >= 10 or any(ranks.codes()), 300)
        assert ranks.codes() == [None, None], ranks.said()
        yield ranks
    finally:
        for rank in ranks.ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("how", "graph", "culprit"),
    [
        (signal.SIGSTOP, "off", 1),
        (signal.SIGSTOP, "off", 0),
        (signal.SIGSTOP, "full_iteration", 1),
        (signal.SIGKILL, "off", 1),
        (signal.SIGKILL, "full_iteration", 0),
    ],
)
def test_a_rank_that_is_gone_is_named_and_the_other_ends(
    how: signal.Signals, graph: str, culprit: int, tmp_path: Path
) -> None:
    with launched(tmp_path, ["train.py"], f"run.graph={graph}") as ranks:
        os.kill(ranks.ranks[culprit].pid, how)
        ranks.until(lambda: None not in ranks.codes(), TIMEOUT + 40)
        (line,) = ranks.told()
        where = f"rank {culprit} ({socket.gethostname()}, pid {ranks.ranks[culprit].pid})"
        fate = "has not answered for" if how == signal.SIGSTOP else "died"
        assert f"{where} {fate}" in line, ranks.said()
        codes = ranks.codes()
        assert codes[1 - culprit] == LOST and codes[culprit] == -signal.SIGKILL, ranks.said()
        (stacks,) = ranks.folder.glob(f"failures/*/rank_{1 - culprit}.txt")
        assert "moe/trainer.py" in stacks.read_text()


def test_a_device_that_hangs_is_named_by_the_one_that_waits(tmp_path: Path) -> None:
    with launched(tmp_path, ["-c", HANGING]) as ranks:
        ranks.until(lambda: None not in ranks.codes(), TIMEOUT + 40)
        (line,) = ranks.told()
        assert "rank 1 " in line and "rank 0 " not in line, ranks.said()
        assert ranks.codes() == [LOST, LOST], ranks.said()
        (record,) = ranks.folder.glob("failures/*/rank_1.collectives.json")
        names = {entry["profiling_name"] for entry in json.loads(record.read_bytes())["entries"]}
        assert any(name.startswith("nccl:") for name in names), names
