"""console.log: every line once, from the first, at once, without secrets, whatever happens."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from phalanx.moe.report.console import NAME, Console


def test_lines_of_both_streams_are_kept_from_the_first_on(tmp_path: Path) -> None:
    out, err, console = io.StringIO(), io.StringIO(), Console(0)
    with redirect_stdout(out), redirect_stderr(err):
        with console.copied():
            print("before there is a folder")
            console.keep(tmp_path, "launch")
            print("one", end="")
            assert (tmp_path / NAME).read_text() == "==== launch\nbefore there is a folder\n"
            print(" and two")
            print("a", "b", sep="\n", file=sys.stderr)
        print("not ours any more")
    kept = "before there is a folder\none and two\n"
    assert (tmp_path / NAME).read_text() == f"==== launch\n{kept}a\nb\n"
    assert out.getvalue() == f"{kept}not ours any more\n" and err.getvalue() == "a\nb\n"


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for launch in ("first", "second"):
        console = Console(0)
        with redirect_stdout(io.StringIO()), console.copied():
            console.keep(tmp_path, launch)
            print(f"step of the {launch}")
    lines = (tmp_path / NAME).read_text().splitlines()
    assert lines == ["==== first", "step of the first", "==== second", "step of the second"]


def test_other_ranks_leave_their_errors_only(tmp_path: Path) -> None:
    console, err = Console(1), io.StringIO()
    with redirect_stdout(io.StringIO()), redirect_stderr(err), console.copied():
        print("of a library", file=sys.stderr)
        console.keep(tmp_path, "")
        print("nothing of this")
        assert list(tmp_path.iterdir()) == []
        print("error: of this rank", file=sys.stderr)
    assert (tmp_path / NAME).read_text() == "error: of this rank\n"
    assert err.getvalue() == "of a library\nerror: of this rank\n"


def test_no_secret_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    console, out = Console(0), io.StringIO()
    with redirect_stdout(out), console.copied():
        print("early 0123456789abcdef")
        console.keep(tmp_path, "x=0123456789abcdef")
        print("late", "01234567", end="")
        print("89abcdef")
    assert (tmp_path / NAME).read_text() == "==== x=***\nearly ***\nlate ***\n"
    assert out.getvalue().startswith("early ***\n")  # the terminal, by what is printed at once


def test_a_full_disk_costs_the_log_only(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    console, out = Console(0), io.StringIO()
    with redirect_stdout(out), console.copied():
        console.keep(tmp_path, "launch")
        assert console._file is not None
        console._file.close()
        console._file = open("/dev/full", "wb", buffering=0)
        print("said all the same")
        console._file = (tmp_path / NAME).open("ab", buffering=0)
        print("and again")
    assert out.getvalue() == "said all the same\nand again\n"
    reported = "\n-- 1 line could not be written here\n"
    assert (tmp_path / NAME).read_text() == f"==== launch\n{reported}and again\n"


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    console = Console(0)
    with redirect_stdout(io.StringIO()), console.copied():
        console.keep(tmp_path, "launch")

        def say(name: str) -> None:
            for _ in range(200):
                print(name, end="")
                print(name)

        threads = [threading.Thread(target=say, args=(name * 20,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = (tmp_path / NAME).read_text().splitlines()[1:]
    assert sorted(lines) == ["a" * 40] * 200 + ["b" * 40] * 200


def test_a_killed_process_leaves_all_that_it_printed(tmp_path: Path) -> None:
    program = (
        "import time; from pathlib import Path; from phalanx.moe.report.console import Console\n"
        "console = Console(0)\n"
        "with console.copied():\n"
        f"    console.keep(Path({str(tmp_path)!r}), 'launch')\n"
        "    print('step 1'); print('half', end=''); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL) as process:
        path, until = tmp_path / NAME, time.monotonic() + 60
        while not (path.exists() and "step 1" in path.read_text()):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    assert path.read_text() == "==== launch\nstep 1\n"
