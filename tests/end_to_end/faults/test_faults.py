"""A rank that stops, dies, hangs or raises: which rank is named, how soon, and what remains.

One second of slack is added to the second that is promised: two cores run the ranks and this.
"""

import contextlib
import ctypes
import importlib
import json
import linecache
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import megatron.core.distributed
import megatron.core.models.gpt.gpt_model  # noqa: F401
import psutil
import pytest

from phalanx.moe.run.faults import FOLDER
from phalanx.parallel.fault.verdict import QUIET, SETTLE
from phalanx.parallel.fault.watchdog import LOST
from tests.support.launch import Launch
from tests.support.runs import TINY, before_step
from tests.support.scheduling import mostly_slow, slow
from tests.support.torchrun import Torchrun

pytestmark = pytest.mark.dist

TIMEOUT = 3
SLACK = 1.0
COMMAND = [*TINY, "data=synthetic", "run.steps=1000"]


def mark_and(act: Callable[[], Any], path: Path) -> None:
    """Record the time, then trigger the fault."""
    path.write_text(str(time.monotonic()))
    act()


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(600)


CASES = {
    "stop": ("has not answered for", -signal.SIGKILL),
    "kill": ("died; it was last heard of in step ", -signal.SIGKILL),
    "exit": ("died; it was last heard of in step ", 1),
    "hang": ("hangs, ", LOST),
    "raise": ("Injected: run.inject=raise@12", 1),
}
"""Message and exit code of the faulty rank by kind of `run.inject`."""


@contextlib.contextmanager
def slow_disk(_rank: int) -> Iterator[None]:
    """A `Change`: lines of code for tracebacks take a second to read."""
    getlines = linecache.getlines

    def slowly(*args: Any) -> list[str]:
        time.sleep(0.05)
        return getlines(*args)

    with mock.patch.object(linecache, "getlines", slowly):
        yield


@pytest.mark.alone
@pytest.mark.parametrize(
    ("case", "culprit"),
    [
        *[("kill", 0), ("hang", 1)],
        *slow(*((case, 0) for case in CASES if case != "kill")),
        *slow(*((case, 1) for case in ("stop", "exit", "raise"))),
    ],
)
def test_the_rank_at_fault_is_named_and_all_end(case: str, culprit: int, tmp_path: Path) -> None:
    output, code = CASES[case]
    fault = f"{case}@12:rank{culprit}"
    command = [
        *COMMAND,
        f"parallel.timeout={TIMEOUT}",
        f"run.dir={tmp_path}",
        f"run.inject={fault}",
    ]
    change = slow_disk if case == "kill" else None
    with Launch(2, command, tmp_path / "out", change) as launch:
        codes = launch.wait(60)
        began = json.loads((tmp_path / "run" / FOLDER / fault).read_bytes())["monotonic"]
        took = max(launch.ended.values()) - began
    other = 1 - culprit
    assert codes[culprit] == code and codes[other] == LOST, launch.output(0) + launch.output(1)
    # A collective breaks at the timeout, and a rank that hangs is told from one that is stopped.
    assert took <= TIMEOUT + (SETTLE + QUIET if case == "hang" else 1) + SLACK
    print(f"{case}, rank {culprit}: all ended after {took:.2f} s, timeout {TIMEOUT} s")

    speaker = culprit if case == "raise" else other
    reported = launch.output(speaker)
    assert output in reported and f"rank {culprit}" in reported
    assert sum(launch.output(rank).count("error: ") for rank in (0, 1)) == (case != "raise")
    (folder,) = (tmp_path / "run/failures").iterdir()
    stacks = {path.stem: path.read_text() for path in folder.glob("*.txt")}
    assert "moe/run/trainer.py" in stacks[f"rank_{other}"]
    assert "step 12" in stacks[f"rank_{other}"]
    if case == "stop":
        assert "its stack is unknown; it was stopped" in stacks[f"rank_{culprit}"]
    if case == "hang":
        assert "in _hang" in stacks[f"rank_{culprit}"]
    record = json.loads((folder / f"rank_{other}.collectives.json").read_bytes())
    assert "gloo:all_reduce" in {entry["profiling_name"] for entry in record["entries"]}


# --- while the others still start ----------------------------------------------------------------

START = 5.0
"""Seconds within which all ranks have ended, whatever they were doing."""
PHASES = {
    "groups": "torch.distributed:init_process_group",
    "model": "phalanx.moe.run.start:setup",
    "data": "phalanx.moe.run.progress:build_datasets",
    "checkpoint": "phalanx.moe.run.start:Checkpointer.newest",
    "first step": "phalanx.moe.run.trainer:Trainer._train_step",
}


@contextlib.contextmanager
def in_phase(rank: int, *, during: str, acts: dict[int, Callable[[], Any]]) -> Iterator[None]:
    """A `Change`: ranks in `acts` act when they call `during`, given as `module:function`."""
    import torch.distributed  # noqa: F401

    module, _, path = during.partition(":")
    *parents, name = path.split(".")
    target: Any = importlib.import_module(module)
    for parent in parents:
        target = getattr(target, parent)
    original = getattr(target, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        acts.get(rank, lambda: None)()
        return original(*args, **kwargs)

    with mock.patch.object(target, name, hooked):
        yield


def hold_up_python() -> None:
    """Call C code that holds the interpreter's lock, like a compiler."""
    ctypes.PyDLL(None).sleep(60)


def be_killed_later(when: Path) -> None:
    time.sleep(1.5)  # the other is in its call by now
    mark_and(be_killed, when)


def check_named(launch: Launch, culprit: int, codes: list[int | None], when: Path) -> float:
    """Check that the others named the dead rank and ended in time; return the seconds."""
    other = 1 - culprit
    output = launch.output(0) + launch.output(1)
    assert codes[culprit] == -signal.SIGKILL and codes[other] == LOST, output
    took = launch.ended[other] - float(when.read_text())
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    who = f"error: rank {culprit} ({socket.gethostname()}, pid {launch.pid(culprit)}) died; "
    assert line.startswith(who), output
    assert took <= START, output
    return took


@pytest.mark.alone
@pytest.mark.parametrize(
    ("phase", "culprit"),
    [
        ("groups", 1),
        *slow(("groups", 0), ("model", 1), ("data", 0), ("checkpoint", 1), ("first step", 0)),
    ],
)
def test_a_rank_killed_while_the_others_start_is_named(
    phase: str, culprit: int, tmp_path: Path
) -> None:
    during = PHASES[phase]
    when = tmp_path / "when"
    command = [*COMMAND, "parallel.timeout=60", f"run.dir={tmp_path}"]
    change = partial(in_phase, during=during, acts={culprit: partial(mark_and, be_killed, when)})
    with Launch(2, command, tmp_path / "out", change) as launch:
        took = check_named(launch, culprit, launch.wait(60), when)
    print(f"{phase}, rank {culprit}: all ended after {took:.2f} s")


@pytest.mark.alone
@mostly_slow("culprit", [0, 1], 0)
def test_ranks_that_cannot_run_python_end_as_well(culprit: int, tmp_path: Path) -> None:
    """None of their threads and signal handlers runs, as in compilers and drivers."""
    when, other = tmp_path / "when", 1 - culprit
    command = [*COMMAND, "parallel.timeout=60", f"run.dir={tmp_path}"]
    acts = {culprit: partial(be_killed_later, when), other: hold_up_python}
    change = partial(in_phase, during=PHASES["model"], acts=acts)
    with Launch(2, command, tmp_path / "out", change) as launch:
        took = check_named(launch, culprit, launch.wait(60), when)
    print(f"rank {culprit}: all ended after {took:.2f} s")
    until = time.monotonic() + 10
    while not (stacks := list((tmp_path / "run/failures").glob(f"*/rank_{other}.txt"))):
        assert time.monotonic() < until  # the guard writes them when its rank is gone
        time.sleep(0.02)
    text = stacks[0].read_text()
    assert "held up Python" in text and "in hold_up_python" in text


BEFORE = """
import os, signal, sys, time
from pathlib import Path
import phalanx.configs.load
from phalanx import train
folder, rank, later = Path(__file__).parent, os.environ["RANK"], phalanx.configs.load.from_argv
def from_argv(argv):
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    if rank == "1":
        while not (folder / "pid_0").exists():
            time.sleep(0.01)
        (folder / "when").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    return later(argv)
phalanx.configs.load.from_argv = from_argv
train._leave(train.main(sys.argv[1:], ends_process=True))
"""


@pytest.mark.alone
def test_a_rank_killed_before_the_ranks_meet_takes_the_others_with_it(tmp_path: Path) -> None:
    """torchrun names it, but would wait 30 s for ranks that wait for the dead one."""
    program = tmp_path / "before.py"
    program.write_text(BEFORE)
    command = [str(program), *COMMAND, f"run.dir={tmp_path}"]
    with Torchrun(2, command, tmp_path) as launch:
        launch.until((tmp_path / "when").exists)
        pid = int((tmp_path / "pid_0").read_text())
        while psutil.pid_exists(pid):
            time.sleep(0.02)
        took = time.monotonic() - float((tmp_path / "when").read_text())
        code, err = launch.wait(), launch.err()
    assert took <= START, err
    assert code == 1 and re.search(r"rank +: 1 \(local_rank: 1\)", err), err
    print(f"all ended after {took:.2f} s")


@contextlib.contextmanager
def wait_in_vain(rank: int, act: Callable[[], Any]) -> Iterator[None]:
    """Rank 1 fails, and rank 0's wait for its tokens ends like that of kernel `push`."""
    from phalanx.parallel.connections import Connections

    def trapped() -> None:
        text = "rank 1 has not reached exchange 41 of experts, only 39"
        Connections.missing = lambda self: text  # type: ignore[method-assign]
        raise RuntimeError("CUDA error: unspecified launch failure")

    with before_step(3, act if rank else trapped):
        yield


@pytest.mark.parametrize(
    ("act", "output"),
    [
        (stop, r"rank 1 \(.*\) has not answered for "),
        (
            hang,
            r"rank 1 \(.*\) hangs, .* in .*; "
            "rank 1 has not reached exchange 41 of experts, only 39; ",
        ),
    ],
)
def test_a_wait_for_tokens_in_vain_names_the_rank_that_did_not_come(
    act: Callable[[], Any], output: str, tmp_path: Path
) -> None:
    command = [*COMMAND, "parallel.timeout=30", f"run.dir={tmp_path}"]
    with Launch(2, command, tmp_path / "out", partial(wait_in_vain, act=act)) as launch:
        assert launch.wait(25)[0] == LOST, launch.output(0)
    (line,) = (line for line in launch.output(0).splitlines() if line.startswith("error: "))
    assert re.search(output, line)
    (stacks,) = (tmp_path / "run/failures").glob("*/rank_0.txt")
    assert "CUDA error: unspecified launch failure" in stacks.read_text()
