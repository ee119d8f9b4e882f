"""Locks of run folders: living, dead, distant and suspended runs."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.parallel import folder_lock
from phalanx.parallel.folder_lock import (
    Claim,
    FolderLock,
    InUse,
    Keeper,
    Owner,
    Taken,
    here,
    release,
)
from tests.parallel.surroundings import full_disk

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / folder_lock.NAME


@pytest.fixture
def said() -> list[str]:
    return []


def leave(path: Path, owner: Owner) -> None:
    """A lock as `owner` would have made it."""
    assert folder_lock._appears(path, owner)


def beat(path: Path, number: int) -> None:
    """A sign of life of the lock's owner."""
    path.write_bytes(b"%020d" % number + path.read_bytes()[20:])


@contextmanager
def living() -> Iterator[Owner]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield replace(here(), pid=process.pid, born=folder_lock._born(process.pid))
        process.kill()


# --- a look from outside --------------------------------------------------------------------------


def test_a_look_takes_nothing(path: Path) -> None:
    assert folder_lock.look(path) == "" and not path.exists()
    with living() as owner:
        leave(path, owner)
        before = path.read_bytes()
        with pytest.raises(InUse, match=f"pid {owner.pid}.*set another run.name"):
            folder_lock.look(path)
        assert path.read_bytes() == before and len(list(path.parent.iterdir())) == 1
    assert folder_lock.look(path) == ""  # it has been killed


def test_a_look_at_a_lock_of_another_host_waits_for_a_beat(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "BEAT", 0.4)
    leave(path, distant())
    line = folder_lock.look(path)
    assert "host node7, pid 4711" in line and "without a sign of its life" in line
    threading.Timer(0.1, beat, (path, 1)).start()
    with pytest.raises(InUse, match="is in use by a run that lives"):
        folder_lock.look(path)


@pytest.mark.parametrize("size", [0, 20])
def test_a_full_disk_keeps_no_lock(path: Path, size: int) -> None:
    taken = Claim(path, print)
    with full_disk(size), pytest.raises(OSError):
        taken.step()
    assert list(path.parent.iterdir()) == []
    leave(path, dead())
    assert taken.step()


def dead() -> Owner:
    with living() as owner:
        return owner


def distant() -> Owner:
    return replace(here(), host="node7", pid=4711, machine="node7 another")


def owner_of(path: Path) -> str:
    owner = folder_lock._owner(path.read_bytes())
    assert owner is not None
    return owner.token


def until_had(claim: Claim) -> float:
    began = time.monotonic()
    while not claim.step():
        assert time.monotonic() - began < 20
        time.sleep(0.02)
    return time.monotonic() - began


def test_a_run_that_lives_is_named(path: Path, said: list[str]) -> None:
    with living() as owner:
        leave(path, owner)
        before = path.read_bytes()
        with pytest.raises(InUse) as caught:
            Claim(path, said.append).step()
    text = str(caught.value)
    assert f"{path.parent} is in use" in text and "\n" not in text and "run.name" in text
    assert f"host {owner.host}, pid {owner.pid}, since {owner.since}" in text
    assert path.read_bytes() == before and not said and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("how", ["dead", "its number is another's", "this process's"])
def test_a_run_that_ended_here_is_followed_at_once(path: Path, said: list[str], how: str) -> None:
    left = {"dead": dead(), "this process's": here()}.get(how)
    leave(path, left or replace(here(), pid=os.getppid(), born=5))
    claim = Claim(path, said.append)
    assert until_had(claim) < 2 and not said
    assert owner_of(path) == claim.me.token and os.listdir(path.parent) == [path.name]


def test_a_distant_run_that_moves_lives(path: Path, said: list[str]) -> None:
    leave(path, distant())
    claim = Claim(path, said.append)
    assert not claim.step() and len(said) == 1
    assert "host node7, pid 4711" in said[0] and "waiting up to 20 s" in said[0]
    beat(path, 1)
    with pytest.raises(InUse, match="node7"):
        claim.step()


@pytest.mark.parametrize("contents", ["distant", "half written"])
def test_a_distant_run_that_does_not_move_is_followed(
    path: Path, said: list[str], contents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "DEAD", 0.5)
    leave(path, distant())
    if contents == "half written":
        path.write_bytes(path.read_bytes()[:40])
    claim = Claim(path, said.append)
    assert until_had(claim) >= 0.5 and len(said) == 1
    assert owner_of(path) == claim.me.token and os.listdir(path.parent) == [path.name]


def test_a_job_that_slurm_queued_again_follows_itself_at_once(
    path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(path, replace(distant(), job="99", restarts=1))
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert not Claim(path, said.append).step()  # another step of the same job: it may live
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    said.clear()
    assert Claim(path, said.append).step() and not said


def test_who_died_while_it_took_a_lock_over_holds_nobody_up(path: Path, said: list[str]) -> None:
    gone, helper = dead(), dead()
    leave(path, gone)
    leave(path.with_name(f"{path.name}.{gone.token}"), helper)
    assert until_had(Claim(path, said.append)) < 2
    assert os.listdir(path.parent) == [path.name]


def test_where_there_are_no_links(
    path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: object, **kw: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    leave(path, dead())
    assert until_had(Claim(path, said.append)) < 2
    with living() as owner:
        path.write_bytes(b"%020d" % 0 + json.dumps(vars(owner)).encode())
        with pytest.raises(InUse):
            Claim(path, said.append).step()


RACE = """
import os, sys, time
from pathlib import Path
from phalanx.parallel.folder_lock import Claim, InUse
folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
for number in range(rounds):
    claim = Claim(folder / str(number) / "lock", lambda text: None)
    (folder / str(number) / f"ready.{os.getpid()}").touch()
    while not (folder / str(number) / "go").exists():
        pass
    try:
        while not claim.step():
            pass
        print(number, claim.me.token, flush=True)
    except InUse:
        pass
(folder / f"tried.{os.getpid()}").touch()
sys.stdin.read()
"""


def test_of_many_that_start_at_once_one_wins(tmp_path: Path) -> None:
    """With a dead run's lock there, and without one."""
    rounds, many = 10, 4
    for number in range(rounds):
        (tmp_path / str(number)).mkdir()
        if number % 2:
            leave(tmp_path / str(number) / folder_lock.NAME, dead())
    command = [sys.executable, "-S", "-c", RACE, str(tmp_path), str(rounds)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    starters = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(many)]
    try:
        for number in range(rounds):
            folder = tmp_path / str(number)
            while len(list(folder.glob("ready.*"))) < many:
                assert all(starter.poll() is None for starter in starters)
                time.sleep(0.005)
            (folder / "go").touch()
        while len(list(tmp_path.glob("tried.*"))) < many:  # a winner that ended can be replaced
            assert all(starter.poll() is None for starter in starters)
            time.sleep(0.005)
    finally:
        told = [starter.communicate()[0] for starter in starters]
    won = [line.split() for text in told for line in text.splitlines()]
    assert sorted(int(number) for number, _ in won) == list(range(rounds))
    for number, token in won:
        assert owner_of(tmp_path / number / folder_lock.NAME) == token


def test_a_run_that_lost_its_lock_may_not_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = Claim(path, print)
    assert claim.step()
    lock = FolderLock(path, claim.me.token)
    lock.check()
    os.replace(folder_lock._written(path, distant()), path)
    lock.check()  # looked a moment ago
    monkeypatch.setattr(folder_lock, "BEAT", 0.0)
    with pytest.raises(Taken) as caught:
        lock.check()
    assert "node7" in str(caught.value) and str(path.parent) in str(caught.value)
    path.unlink()
    with pytest.raises(Taken, match="is gone"):
        lock.check()


def test_the_keeper_shows_life_and_leaves_another_owners_lock_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "BEAT", 0.02)
    claim = Claim(path, print)
    assert claim.step()
    keeper, before = Keeper(path, claim.me.token), path.read_bytes()
    while (now := path.read_bytes()) == before:
        time.sleep(0.01)
    assert now[20:] == before[20:] and int(now[:20]) > 0
    os.replace(folder_lock._written(path, distant()), path)
    taken = path.read_bytes()
    time.sleep(0.2)
    keeper.release()
    assert path.read_bytes() == taken and os.listdir(path.parent) == [path.name]


def test_release(path: Path) -> None:
    claim = Claim(path, print)
    assert claim.step()
    release(path, "another")
    assert path.exists()
    release(path, claim.me.token)
    assert os.listdir(path.parent) == []


OWNING = """
import sys, time
from pathlib import Path
from phalanx.parallel.folder_lock import Claim
from phalanx.parallel.fault.guard import Guard
with Guard() as guard:
    claim = Claim(Path(sys.argv[1]), print)
    assert claim.step()
    guard.send({"do": "keep", "path": sys.argv[1], "token": claim.me.token})
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_guard_releases_the_lock_of_a_run_that_is_killed(
    path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", OWNING, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "locked\n"
        time.sleep(0.2)  # until the guard has read of it; otherwise the next run sees who is dead
        assert path.exists()
        process.send_signal(number)
        process.wait()
        until = time.monotonic() + 10
        while path.exists():
            assert time.monotonic() < until
            time.sleep(0.01)
