"""A signal to one rank ends all of them at the same step, with a checkpoint, whenever it comes."""

import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from phalanx.parallel import runtime
from tests.support.distributed import forkserver
from tests.support.runs import TINY, exact, records, run
from tests.support.scheduling import mostly_slow

pytestmark = pytest.mark.dist

STEPS = 4
COMMAND = [
    *TINY,
    "data=synthetic",
    *[f"run.steps={STEPS}", "run.requeue_code=85", "run.save_interval=2"],
    *["run.eval_interval=2", "run.eval_batches=1"],
]
TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


@contextmanager
def signalled(
    rank: int, *, only: int, during: str, call: int, signals: Sequence[signal.Signals]
) -> Iterator[None]:
    """Rank `only` gets `signals` in the `call`-th call of `during`, as `module:function`."""
    if rank != only:
        yield
        return
    module, _, path = during.partition(":")
    *parents, name = path.split(".")
    target: Any = importlib.import_module(module)
    for parent in parents:
        target = getattr(target, parent)
    original, calls = getattr(target, name), iter(range(1, 1000))

    def hooked(*args: Any, **kwargs: Any) -> Any:
        now = next(calls) == call
        for number in signals if now else ():
            os.kill(os.getpid(), number)
        return original(*args, **kwargs)

    with mock.patch.object(target, name, hooked):
        yield


STEP = "phalanx.moe.run.trainer:Trainer._train_step"
SAVE = "phalanx.moe.run.start:Checkpointer.save"
WRITE = "phalanx.parallel.checkpoint.checkpointer:Writing.finish"
MOMENTS = {
    "the start, before the ranks meet": ("phalanx.moe.run.entry:start", 1, [TERM], 0),
    "the start, in the model": ("phalanx.moe.run.start:setup", 1, [USR1], 0),
    "the start, in the checkpoint": ("phalanx.moe.run.progress:Progress.resume", 1, [INT], 0),
    "the first step": (STEP, 1, [TERM], 1),
    "a step, SIGTERM": (STEP, 3, [TERM], 3),
    "a step, SIGUSR1": (STEP, 3, [USR1], 3),
    "a step, SIGINT": (STEP, 3, [INT], 3),
    "a step, SIGTERM twice": (STEP, 3, [TERM, TERM], 3),
    "a step, SIGINT twice": (STEP, 3, [INT, INT], 3),
    "a step, one of each": (STEP, 3, [USR1, INT, TERM], 3),
    "a validation": ("phalanx.moe.run.callbacks.validation:Validation.scores", 1, [TERM], 3),
    "a save": (SAVE, 1, [USR1], 3),
    "the end of a save": (WRITE, 1, [TERM], 3),
    "a save in the background": (SAVE, 1, [TERM], 3),
    "the last step": (STEP, STEPS, [TERM], STEPS),
    "the last save": (SAVE, 2, [TERM], STEPS),
}
RARE = [
    *["the start, in the model", "the first step", "a step, SIGTERM", "a step, SIGINT"],
    *["a step, SIGUSR1", "a step, SIGTERM twice", "a step, one of each", "a save"],
    *["a step, SIGINT twice", "the end of a save", "the last step", "the last save"],
]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    """Losses and gradient norms of an undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    assert [rank.code for rank in run(2, [*COMMAND, f"run.dir={folder}"])] == [0, 0]
    return exact(records(folder / "run"))


@mostly_slow("moment", MOMENTS, *(moment for moment in MOMENTS if moment not in RARE))
def test_all_ranks_stop_at_one_step_and_go_on_bit_for_bit(
    moment: str, straight: list[tuple[int, str, str]], tmp_path: Path
) -> None:
    during, call, signals, reached = MOMENTS[moment]
    only = list(MOMENTS).index(moment) % 2
    command = [*COMMAND, f"run.dir={tmp_path}"]
    command += ["run.async_save=on"] if "background" in moment else []
    change = partial(signalled, only=only, during=during, call=call, signals=signals)
    ranks = run(2, command, change)
    finished = reached == STEPS
    assert [rank.code for rank in ranks] == [0 if finished else 85] * 2
    assert [rank.err for rank in ranks] == ["", ""] and ranks[1].out == ""
    if not (finished and "save" in moment):  # after the last step nobody asks
        when = f"after step {reached}" if reached else "before step 1"
        reported = f"-- stopping {when}: a signal asked for it ({signals[0].name} to rank {only})"
        assert [line for line in ranks[0].out.splitlines() if "signal" in line] == [reported]
    assert (
        "-- no checkpoint was written: the same command starts from scratch\n" in ranks[0].out
    ) == (reached == 0)
    assert exact(records(tmp_path / "run")) == straight[:reached]
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step_*"))
    assert saved[-1:] == ([f"step_{reached:08d}"] if reached else [])
    if not reached:
        return

    assert [rank.code for rank in run(2, command)] == [0, 0]
    assert exact(records(tmp_path / "run")) == straight


def _rank(pipe: connection.Connection) -> None:
    os.environ.update(TORCHELASTIC_RUN_ID="any", CUDA_VISIBLE_DEVICES="")

    def stopped(*_: Any) -> None:
        pipe.send("asked to stop")
        raise SystemExit

    signal.signal(signal.SIGTERM, stopped)
    runtime.start(seed=0, timeout=60, deterministic=False)
    pipe.send("runs")
    time.sleep(60)
    pipe.send("never asked")


def _launcher(pipe: connection.Connection) -> None:
    rank = multiprocessing.get_context("fork").Process(target=_rank, args=(pipe,))
    rank.start()
    pipe.close()
    rank.join()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells of the end of a parent")
def test_ranks_end_when_torchrun_is_killed() -> None:
    here, there = forkserver().Pipe()
    launcher = forkserver().Process(target=_launcher, args=(there,))
    launcher.start()
    there.close()
    assert here.recv() == "runs"
    launcher.kill()
    assert here.recv() == "asked to stop"
    with pytest.raises(EOFError):  # which comes with the end of the rank
        here.recv()
    launcher.join()


def test_a_stop_tells_what_the_same_command_goes_on_from(tmp_path: Path) -> None:
    """Runs that write no checkpoint at their end."""
    command = [*COMMAND, f"run.dir={tmp_path}"]
    never = [*command, "run.save_interval=-1"]
    change = partial(signalled, only=0, during=STEP, call=2, signals=[INT])
    reported = "-- no checkpoint was written: the same command {}\n"
    (rank,) = run(1, never, change)
    assert reported.format("starts from scratch") in rank.out
    (rank,) = run(1, command, partial(signalled, only=0, during=STEP, call=3, signals=[INT]))
    assert "no checkpoint was written" not in rank.out and "checkpoint of step 3" in rank.out
    (rank,) = run(1, never, partial(signalled, only=0, during=STEP, call=1, signals=[INT]))
    assert rank.code == 0  # that was the last step
    (rank,) = run(1, [*never, "run.steps=9"], change)
    assert reported.format("continues from step 3") in rank.out


def test_a_third_interrupt_does_not_wait(tmp_path: Path) -> None:
    command = [*COMMAND, f"run.dir={tmp_path}"]
    change = partial(signalled, only=0, during=STEP, call=2, signals=[INT] * 3)
    (rank,) = run(1, command, change)
    reported = "interrupted: nothing more was saved; there is no checkpoint\n"
    assert rank.code == 130 and rank.err.endswith(reported)
    assert not list((tmp_path / "run/checkpoints").glob("step_*"))
