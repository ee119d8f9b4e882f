"""The kernel cache: entries survive, damage and bad folders are survived, racers make one entry."""

import fcntl
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from phalanx.kernels import cache as module
from phalanx.kernels.cache import Cache, digest_of, folder, name_of, statistics

NAME = name_of("some kernel", "fact")
DATA = bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def _says_things_again():
    module._warn.cache_clear()


def forbidden() -> bytes:
    raise AssertionError("made anew")


def files(where: Path) -> list[str]:
    return sorted(p.name for p in where.iterdir())


def test_entries_are_made_once(tmp_path):
    where = tmp_path / "not" / "yet"
    before = statistics()
    assert not Cache(where).has(NAME)
    assert Cache(where).fetch(NAME, lambda: DATA) == DATA
    assert Cache(where).fetch(NAME, forbidden) == DATA
    assert Cache(where).has(NAME)
    assert files(where) == [NAME]  # nothing temporary, no locks
    after = statistics()
    assert (after.compiled - before.compiled, after.loaded - before.loaded) == (1, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:7] + bytes([content[7] ^ 1]) + content[8:],
        lambda content: content + b"\0",
        lambda content: bytes(len(content)),
    ],
    ids=["empty", "last byte lost", "half", "one bit", "longer", "zeros"],
)
def test_damaged_entries_are_made_again_and_it_is_said_once(tmp_path, damage, caplog):
    cache = Cache(tmp_path)
    cache.fetch(NAME, lambda: DATA)
    path = tmp_path / NAME
    path.write_bytes(damage(path.read_bytes()))
    assert not cache.has(NAME)
    assert cache.fetch(NAME, lambda: DATA) == DATA
    assert cache.fetch(NAME, forbidden) == DATA
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(path) in record.getMessage()


def test_an_entry_that_cannot_be_read_is_made_again(tmp_path, caplog):
    (tmp_path / NAME).mkdir()
    assert Cache(tmp_path).fetch(NAME, lambda: DATA) == DATA
    assert "cannot be read" in caplog.text


def test_a_folder_that_cannot_be_written_costs_compilations_only(tmp_path, caplog):
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "folder")
    for number in range(3):
        assert cache.fetch(f"{number}.o", lambda: DATA) == DATA
    (record,) = caplog.records
    assert "PHALANX_KERNEL_CACHE" in record.getMessage()


def test_what_cannot_be_made_raises_and_leaves_nothing(tmp_path):
    for _ in range(2):  # the lock is free again
        with pytest.raises(AssertionError, match="made anew"):
            Cache(tmp_path).fetch(NAME, forbidden)
    assert Cache(tmp_path).fetch(NAME, lambda: DATA) == DATA
    assert files(tmp_path) == [NAME]


def _race(where: Path, ready, log: Path) -> None:
    def make() -> bytes:
        with log.open("a") as out:
            out.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        return DATA

    before = statistics()
    ready.wait()
    assert Cache(where).fetch(NAME, make) == DATA
    after = statistics()
    assert (after.compiled > before.compiled) != (after.loaded > before.loaded)


def test_of_racing_processes_one_makes_the_entry(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, log = context.Barrier(4), tmp_path / "log"
    racers = [
        context.Process(target=_race, args=(tmp_path / "cache", ready, log)) for _ in range(4)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0] * 4
    assert len(log.read_text().splitlines()) == 1
    assert files(tmp_path / "cache") == [NAME]


def _die(where: Path) -> None:
    Cache(where).fetch(NAME, lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_process_that_died_while_compiling_blocks_nobody(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_die, args=(tmp_path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    begin = time.monotonic()
    assert Cache(tmp_path).fetch(NAME, lambda: DATA) == DATA
    assert time.monotonic() - begin < 5
    assert files(tmp_path) == [NAME]


def test_patience_with_others_ends(tmp_path, caplog):
    cache = Cache(tmp_path, patience=0.2)
    with (tmp_path / f".{NAME}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert cache.fetch(NAME, lambda: DATA) == DATA
    assert "waited 0.2 s" in caplog.text
    assert cache.fetch(NAME, forbidden) == DATA


def test_names_change_with_every_fact():
    names = [
        name_of("Kernel", "sm_90a", "4.8.1"),
        name_of("Kernel", "sm_100a", "4.8.1"),
        name_of("Kernel", "sm_90a", "4.9.0"),
        name_of("Kernel", "sm_90a4.8.1"),
        name_of("Other", "sm_90a", "4.8.1"),
    ]
    assert len(set(names)) == len(names)
    assert name_of("Kernel", "sm_90a", "4.8.1") == names[0]
    assert names[0].startswith("Kernel-") and name_of("a/b c", "").startswith("a-b-c-")


def test_digests_change_with_contents_and_names(tmp_path):
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text("x = 1")
    second.write_text("y = 2")
    digest = digest_of([first, second])
    assert digest_of([second, first]) == digest
    second.write_text("y = 3")
    assert digest_of([first, second]) != digest
    second.write_text("y = 2")
    assert digest_of([first, second]) == digest
    assert digest_of([first, second.rename(tmp_path / "c.py")]) != digest


def test_the_folder_is_the_users_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("PHALANX_KERNEL_CACHE", str(tmp_path))
    assert folder() == tmp_path
    monkeypatch.delenv("PHALANX_KERNEL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache/phalanx/kernels"
