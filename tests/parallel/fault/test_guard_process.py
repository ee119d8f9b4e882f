"""A rank's guard on sockets of this process."""

import json
import os
import selectors
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.parallel.fault.guard_process import GuardProcess
from phalanx.parallel.fault.verdict import QUIET, Where


def test_rank_and_hub_may_go_at_once() -> None:
    (rank, of_rank), (hub, of_hub) = socket.socketpair(), socket.socketpair()
    guard = GuardProcess(of_rank, os.getpid(), stacks=0, alone=False)
    guard._link, guard._rests[of_hub] = of_hub, b""
    guard._selector.register(of_hub, selectors.EVENT_READ, guard._hear_hub)
    rank.close()
    hub.close()
    guard.run()
    assert of_hub.fileno() == -1 and guard._verdict is None
    of_rank.close()


@pytest.mark.parametrize("told", [False, True])
def test_the_user_is_told_once(
    told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The guard that ends a rank tells why, unless the rank has."""
    rank, of_rank = socket.socketpair()
    process = subprocess.Popen(["sleep", "60"])
    guard = GuardProcess(of_rank, process.pid, stacks=0, alone=False)
    guard._folder, guard._where = tmp_path, Where(0, "here", process.pid, 0.0)
    try:
        guard._receive({"text": "rank 1 died", "kind": "died", "speaker": 0, "where": {}})
        for message in [{"do": "ending", "limit": 0.0}] + [{"do": "told"}] * told:
            rank.sendall(json.dumps(message).encode() + b"\n")
        guard._hear_rank()
        guard._look(time.monotonic())
        assert process.wait(10) < 0
        assert capfd.readouterr().err.count("error: rank 1 died") == (not told)
    finally:
        process.kill()
        rank.close()
        of_rank.close()


def test_stacks_that_a_guard_writes_are_for_the_user_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "/slashed+key")
    rank, of_rank = socket.socketpair()
    with rank, of_rank, (tmp_path / "stacks").open("w+") as stacks:
        stacks.write("File train.py")
        stacks.flush()
        guard = GuardProcess(of_rank, os.getpid(), stacks.fileno(), alone=False)
        guard._folder, guard._where = tmp_path / "failures/now", Where(2, "here", 1, 0.0)
        guard._verdict = {"text": "rank 1 died of /slashed+key"}
        guard._write_stacks()
    (left,) = (tmp_path / "failures/now").iterdir()
    assert left.read_text().startswith("rank 1 died of ***\n")
    assert left.read_text().endswith("held up Python\n\nFile train.py")
    assert (left.stat().st_mode & 0o777, left.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize(("rank", "named"), [(1, True), (0, False)])
def test_a_silent_hub_is_rank_0_for_all_others(rank: int, named: bool) -> None:
    """Rank 0's own guard has the hub, and was merely slow if it has not heard of it."""
    (of_test, of_rank), (hub, of_hub) = socket.socketpair(), socket.socketpair()
    guard = GuardProcess(of_rank, os.getpid(), stacks=0, alone=False)
    guard._where, guard._rank_0 = (Where(r, "here", os.getpid(), 0.0) for r in (rank, 0))
    guard._link, guard._hub = of_hub, None if rank else SimpleNamespace()
    guard._failed, guard._heard = True, time.monotonic() - 2 * QUIET
    guard._look(time.monotonic())
    assert (guard._verdict is not None) == named
    if guard._verdict is not None:
        assert guard._verdict["kind"] == "silent" and guard._verdict["where"]["rank"] == 0
    for connection in (of_test, of_rank, hub, of_hub):
        connection.close()
