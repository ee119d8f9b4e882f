"""Which rank speaks when a run cannot go on, what it says, and the exit code."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.configs.validate import ConfigError
from phalanx.kernels.registry import KernelUnavailable
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.run import failure
from phalanx.moe.run.memory_check import OutOfMemory
from phalanx.parallel.checkpoint.saved_config import CheckpointError, NoUsableCheckpoint
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.connections import Connections
from phalanx.parallel.cuda_graph import CaptureFailed
from phalanx.parallel.engine import Diverged
from phalanx.parallel.fault.signals import StopSignal

GLOO = RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [::1]:4\nmore")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_GRACE", 0.3)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)


@pytest.fixture
def stop() -> Iterator[StopSignal]:
    with StopSignal() as stop:
        yield stop


def exit_with(error: Exception, stop: StopSignal, rank: int = 0, training: bool = True) -> int:
    try:
        raise error
    except Exception as raised:
        return failure.exit_with(raised, stop, rank=rank, training=training)


def test_a_failed_capture_is_one_line_with_what_to_set(
    stop: StopSignal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_with(CaptureFailed("RuntimeError: no (loss.py:7)"), stop) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the step could not be captured") and "(loss.py:7)" in line
    assert line.endswith("set run.graph=off or run.graph=auto")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("what"), 2),
        (KernelUnavailable("what"), 2),
        (DataError("what"), 2),
        (CheckpointMismatch("what"), 2),
        (CheckpointError("what"), 2),
        (NoUsableCheckpoint("what"), 44),
        (Diverged("what"), 43),
    ],
)
def test_what_is_wrong_with_the_input_is_one_line(
    error: Exception, code: int, stop: StopSignal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_with(error, stop) == code
    assert capsys.readouterr() == ("", "error: what\n")


def test_out_of_memory_says_what_to_set(
    stop: StopSignal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        exit_with(OutOfMemory("data.micro_batch=4: lower it (Tried to allocate 9 GiB.)"), stop) == 1
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: data.micro_batch=4: lower it")


def test_a_bug_shows_its_stack(stop: StopSignal, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_with(ValueError("shape"), stop, training=True) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and "raise error" in err and "ValueError: shape" in err
    assert exit_with(ValueError("shape"), stop, training=False) == 2
    assert capsys.readouterr().err == "error: shape\n"


@pytest.mark.parametrize("error", [DataError("what"), KeyError("bug"), GLOO])
def test_a_rank_that_is_signalled_leaves_the_word_to_another(
    error: Exception, stop: StopSignal, capsys: pytest.CaptureFixture[str]
) -> None:
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    assert exit_with(error, stop, rank=3) > 0
    assert capsys.readouterr() == ("", "")


def test_a_rank_that_fails_alone_speaks(
    stop: StopSignal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_with(DataError("what"), stop, rank=3) == 2
    assert capsys.readouterr().err == "error: what (rank 3)\n"


@pytest.mark.parametrize("error", [GLOO, dist.DistBackendError(str(GLOO))])
@pytest.mark.parametrize("rank", [0, 1])
def test_lost_peers_are_told_only_if_nobody_ends_this_rank(
    error: Exception, rank: int, stop: StopSignal, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_with(error, stop, rank=rank) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the other ranks are gone: [../gloo") and "closed by peer" in line
    stop.received = "SIGTERM"
    assert exit_with(error, stop, rank=rank) == 1
    assert capsys.readouterr().err == ""


def test_the_launcher_is_told(
    tmp_path: Path, stop: StopSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    exit_with(DataError("what"), stop)
    seen = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    assert seen.message["extraInfo"]["py_callstack"] == "error: what"
    assert seen.timestamp > 1e9 and json.loads(path.read_text())
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no/folder"))
    assert exit_with(DataError("what"), stop) == 2


class StandIn:
    """A watchdog that has decided who is to speak."""

    def __init__(self, speaks: bool) -> None:
        self.speaks, self.reported = speaks, tuple[Exception, str, bool]()

    def report(self, error: Exception, reason: str, *, own: bool) -> bool:
        self.reported = (error, reason, own)
        return self.speaks


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("speaks", [True, False])
def test_the_watchdog_says_who_speaks(
    rank: int, speaks: bool, stop: StopSignal, capsys: pytest.CaptureFixture[str]
) -> None:
    watchdog = StandIn(speaks)
    error = DataError("what")
    code = failure.exit_with(error, stop, rank=rank, training=True, watchdog=watchdog)  # type: ignore[arg-type]
    assert code == 2 and watchdog.reported == (error, "what", True)
    told = "error: what (rank 3)\n" if rank else "error: what\n"
    assert capsys.readouterr().err == (told if speaks else "")


LATE = "rank 1 has not reached exchange 41 of experts, only 39"
TRAP = RuntimeError("CUDA error: unspecified launch failure\nSearch for `cudaErrorLaunchFailure'")


@pytest.mark.parametrize(
    ("error", "late", "reported"),
    [
        (TRAP, LATE, (LATE, False)),  # a kernel that waited for rank 1 has stopped
        (TRAP, "", ("CUDA error: unspecified launch failure", True)),
        (GLOO, "", (str(GLOO).splitlines()[0], False)),
        (DataError("what"), LATE, ("what", True)),
    ],
)
def test_a_wait_in_vain_is_the_fault_of_the_rank_that_did_not_come(
    error: Exception,
    late: str,
    reported: tuple[str, bool],
    stop: StopSignal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = Connections()
    monkeypatch.setattr(connections, "missing", lambda: late)
    watchdog: Any = StandIn(False)
    given = dict(rank=0, training=True, watchdog=watchdog, connections=connections)
    failure.exit_with(error, stop, **given)
    assert watchdog.reported[1:] == reported
