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

from phalanx.moe.report.loggers import read
from phalanx.parallel.fault.watchdog import LOST
from tests.support.launch import free_port

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT = 20
OVERRIDES = [
    *["model=tiny", "kernels=fused", "run.device=cuda", "run.name=run", "run.steps=100000"],
    *["run.save_interval=-1", "data=synthetic", "data.sequence_length=256", "data.micro_batch=2"],
    *["data.global_batch=8", "optim.decay_steps=1000", "parallel.expert=2"],
    *["parallel.dispatch=symm", f"parallel.timeout={TIMEOUT}"],
]
STAGES = "parallel.pipeline=2 parallel.expert=1 parallel.dispatch=auto"
HANGING = """
import os, sys, torch, train
from contextlib import nullcontext
from tests.support.runs import before_step
later = before_step(12, lambda: torch.cuda._sleep(10**14))  # for hours
with later if os.environ["RANK"] == "1" else nullcontext():
    train._leave(train.main(sys.argv[1:], ends_process=True))
"""


READING = """
import os, sys, torch, train
from phalanx.moe.run import step
mean_loss = step.mean_loss
def read(*args, **how):
    if torch.cuda.is_current_stream_capturing() and os.environ["RANK"] == "1":
        args[0].sum().item()
    return mean_loss(*args, **how)
step.mean_loss = read
train._leave(train.main(sys.argv[1:], ends_process=True))
"""
DYING = """
import os, signal, sys, time, train
from contextlib import nullcontext
from pathlib import Path
from unittest import mock
from phalanx.parallel.cuda_graph import StepGraph
from phalanx.parallel.fault.watchdog import Watchdog
from tests.support.runs import before_step
phase, culprit = os.environ["PHASE"], os.environ["RANK"] == "1"
def die(*args, **how):
    if phase == "compile":
        time.sleep(float(os.environ["AFTER"]))  # the other one is at its kernels
    Path(os.environ["WHEN"]).write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
changes = {
    "nccl": lambda: mock.patch("torch.distributed.init_process_group", die),
    "compile": lambda: before_step(1, die),
    "capture": lambda: mock.patch.object(StepGraph, "_capture", die),
}
with changes[phase]() if culprit else nullcontext():
    train._leave(train.main(sys.argv[1:], ends_process=True))
"""


@pytest.fixture(autouse=True)
def _two_hoppers() -> None:
    if torch.cuda.device_count() < 2 or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs two Hopper GPUs")


class Ranks:
    """Processes like torchrun's, two by default; none is ended because of another."""

    def __init__(self, folder: Path, program: Sequence[str], *more: str, count: int = 2) -> None:
        command = [sys.executable, *program, *OVERRIDES, f"run.dir={folder}", *more]
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        place["WORLD_SIZE"] = str(count)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / "run"
        self.files = [folder / f"{rank}.txt" for rank in range(count)]
        self.ranks = []
        for rank, path in enumerate(self.files):
            env = os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with path.open("w") as out:
                both = dict(stdout=out, stderr=subprocess.STDOUT)
                self.ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, **both))

    def output(self) -> str:
        return "\n".join(path.read_text()[-6000:] for path in self.files)

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return len(read(path)) if path.exists() else 0

    def until(self, seen: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not seen():
            assert time.monotonic() < end, self.output()
            time.sleep(0.1)

    def codes(self) -> list[int | None]:
        return [rank.poll() for rank in self.ranks]

    def reported(self) -> list[str]:
        lines = [line for path in self.files for line in path.read_text().splitlines()]
        return [line for line in lines if line.startswith("error: ")]

    def error(self) -> str:
        """The only line on an error."""
        lines = self.reported()
        assert len(lines) == 1, f"{lines}\n{self.output()}"
        return lines[0]

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


@contextmanager
def launched(folder: Path, program: Sequence[str], *more: str) -> Iterator[Ranks]:
    ranks = Ranks(folder, program, *more)
    try:
        ranks.until(lambda: ranks.steps() >= 10 or any(ranks.codes()), 300)
        assert ranks.codes() == [None, None], ranks.output()
        yield ranks
    finally:
        ranks.end()


@pytest.mark.parametrize(
    ("how", "given", "culprit"),
    [
        (signal.SIGSTOP, "run.graph=off", 1),
        (signal.SIGSTOP, "run.graph=off", 0),
        (signal.SIGSTOP, "run.graph=full_iteration", 1),
        (signal.SIGKILL, "run.graph=off", 1),
        (signal.SIGKILL, "run.graph=full_iteration", 0),
        (signal.SIGSTOP, f"run.graph=full_iteration {STAGES}", 0),
        (signal.SIGKILL, f"run.graph=full_iteration {STAGES}", 1),
    ],
)
def test_a_rank_that_is_gone_is_named_and_the_other_ends(
    how: signal.Signals, given: str, culprit: int, tmp_path: Path
) -> None:
    with launched(tmp_path, ["train.py"], *given.split()) as ranks:
        os.kill(ranks.ranks[culprit].pid, how)
        ranks.until(lambda: None not in ranks.codes(), TIMEOUT + 40)
        line = ranks.error()
        where = f"rank {culprit} ({socket.gethostname()}, pid {ranks.ranks[culprit].pid})"
        fate = "has not answered for" if how == signal.SIGSTOP else "died"
        assert f"{where} {fate}" in line, ranks.output()
        codes = ranks.codes()
        assert codes[1 - culprit] == LOST and codes[culprit] == -signal.SIGKILL, ranks.output()
        (stacks,) = ranks.folder.glob(f"failures/*/rank_{1 - culprit}.txt")
        assert "moe/run/trainer.py" in stacks.read_text()


@pytest.mark.parametrize(
    ("phase", "after"),
    [("nccl", 0), ("compile", 1), ("compile", 4), ("compile", 8), ("capture", 0)],
)
def test_a_rank_killed_while_the_other_starts_is_named_in_five_seconds(
    phase: str, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers block Python for seconds; rendezvous and captures wait for the dead rank."""
    monkeypatch.setenv("PHALANX_KERNEL_CACHE", str(tmp_path / "kernels"))  # nothing is compiled yet
    monkeypatch.setenv("PHASE", phase)
    monkeypatch.setenv("AFTER", str(after))
    monkeypatch.setenv("WHEN", str(tmp_path / "when"))
    ranks = Ranks(tmp_path, ["-c", DYING], "run.graph=full_iteration", "parallel.timeout=120")
    try:
        ranks.until((tmp_path / "when").exists, 300)
        ranks.until(lambda: None not in ranks.codes(), 60)
        took = time.monotonic() - float((tmp_path / "when").read_text())
        print(f"{phase}, {after} s: all ended after {took:.2f} s")
        line = ranks.error()
        where = f"rank 1 ({socket.gethostname()}, pid {ranks.ranks[1].pid})"
        assert f"{where} died" in line, ranks.output()
        assert ranks.codes() == [LOST, -signal.SIGKILL] and took <= 5, (took, ranks.output())
    finally:
        ranks.end()


def test_a_device_that_hangs_is_named_by_the_one_that_waits(tmp_path: Path) -> None:
    with launched(tmp_path, ["-c", HANGING]) as ranks:
        ranks.until(lambda: None not in ranks.codes(), TIMEOUT + 40)
        line = ranks.error()
        assert "rank 1 " in line and "rank 0 " not in line, ranks.output()
        assert ranks.codes() == [LOST, LOST], ranks.output()
        (record,) = ranks.folder.glob("failures/*/rank_1.collectives.json")
        names = {entry["profiling_name"] for entry in json.loads(record.read_bytes())["entries"]}
        assert any(name.startswith("nccl:") for name in names), names


def test_a_capture_that_fails_on_one_rank_is_given_up_by_both(tmp_path: Path) -> None:
    """A host read breaks the capture itself; later steps are eager."""
    programs = {"eager": "off", "auto": "auto", "forced": "full_iteration"}
    runs = {
        name: Ranks(tmp_path / name, ["-c", READING], f"run.graph={graph}", "run.steps=8")
        for name, graph in programs.items()
    }
    try:
        for ranks in runs.values():
            ranks.until(lambda ranks=ranks: None not in ranks.codes(), 300)  # type: ignore[misc]
        assert runs["eager"].codes() == runs["auto"].codes() == [0, 0], runs["auto"].output()
        want, got = (read(runs[name].folder / "metrics.jsonl") for name in ("eager", "auto"))
        for number in ("loss", "grad_norm"):
            assert [step[number] for step in got] == [step[number] for step in want]
        assert (
            got[-1]["eager_steps"] == 6
            and "(rank 1); steps are eager from" in runs["auto"].output()
        )
        line = runs["forced"].error()
        assert "could not be captured" in line and line.endswith("run.graph=auto")
        assert 1 in runs["forced"].codes()
    finally:
        for ranks in runs.values():
            ranks.end()
