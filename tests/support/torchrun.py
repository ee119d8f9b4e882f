"""torchrun whose processes are forked from a server with the imports of a run preloaded.

The launcher's own code runs, with its rendezvous, restarts and reports; in place of `python -u
<script>` a rank is a fork that runs the script as its main program. What a start of torchrun and of
Python adds to that is in test_scripts and test_installation, which start both as processes.
"""

import contextlib
import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.support.distributed import forkserver, keep_imports

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHERS = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "WANDB_MODE",
]


class _Forked:
    """A process whose output is in files of a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def out(self) -> str:
        """Standard output, that of its ranks included."""
        return (self._folder / "out.txt").read_text()

    def err(self) -> str:
        """Standard error, that of its ranks included."""
        return (self._folder / "err.txt").read_text()


class Torchrun(_Forked):
    """A launcher on this machine; leaving the context kills it and its ranks.

    Args:
        ranks: number of ranks.
        command: the script, from the root of the project or absolute, and its arguments.
        folder: empty or new folder for the output.
        options: further options of torchrun.
        limit: seconds after which all are killed.
        environment: further variables of the launcher.
    """

    def __init__(
        self,
        ranks: int,
        command: Sequence[str],
        folder: Path,
        options: Sequence[str] = (),
        limit: float = 150,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder)
        words = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", "localhost:0", *options, *command]
        self._process = forkserver().Process(
            target=_launch, args=(words, folder, environment or {})
        )
        self._guard = threading.Timer(limit, self._kill)

    def __enter__(self) -> "Torchrun":
        self._process.start()
        self._guard.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._guard.cancel()
        self._kill()
        self._process.join()

    def _kill(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
            self._process.kill()

    def pid(self, rank: int) -> int:
        """Process id of a rank, as started last."""
        return int((self._folder / f"rank_{rank}.pid").read_text())

    def until(self, seen: Callable[[], Any]) -> None:
        """Wait until `seen` is true."""
        while not seen():
            assert self._process.is_alive(), self.err()
            time.sleep(0.02)

    def wait(self) -> int:
        """The launcher's exit code."""
        self._process.join()
        return self._process.exitcode


class Program(_Forked):
    """A script as the main program of a fork, started at once, with its output in files.

    Args:
        words: the script, from the root of the project or absolute, and its arguments.
        folder: empty or new folder for the output.
        environment: further variables.
    """

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._process = forkserver().Process(
            target=_run_program, args=(list(words), folder, dict(environment))
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def wait(self, timeout: float = 150) -> int | None:
        """The exit code, None if it still ran after `timeout` seconds; it is killed then."""
        self._process.join(timeout)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        return code


class _Rank:
    """Stands in for a subprocess.Popen of `python -u <script> <arguments>`."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_as_main, args=(command, environment))
        self._process.start()
        self.pid = self._process.pid
        (folder / f"rank_{environment['RANK']}.pid").write_text(str(self.pid))

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        until = math.inf if timeout is None else time.monotonic() + timeout
        while self._process.exitcode is None:  # join() would also wait for forks of the rank
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("rank", timeout or 0)
            time.sleep(0.01)
        return self._process.exitcode


def _launch(words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    keep_imports()
    for name in _LAUNCHERS:
        os.environ.pop(name, None)
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", **environment}
    _redirect(folder)
    SubprocessHandler._popen = lambda self, args, env: _Rank(args, env, folder)
    run.main(words)


def _run_program(words: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    keep_imports()
    _redirect(folder)
    _as_main([sys.executable, "-u", *words], os.environ | environment)


def _redirect(folder: Path) -> None:
    """Go to the root of the project, and write what is printed to files of a folder."""
    os.chdir(ROOT)
    for number, name in ((1, "out.txt"), (2, "err.txt")):
        with open(folder / name, "a") as file:
            os.dup2(file.fileno(), number)


def _as_main(command: Sequence[str], environment: dict[str, str]) -> None:
    """Behave like a new Python process with this command line."""
    interpreter, unbuffered, *sys.argv = command
    assert (interpreter, unbuffered) == (sys.executable, "-u")
    sys.orig_argv = [*command]
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    with _lines_at_once():
        runpy.run_path(sys.argv[0], run_name="__main__")


@contextlib.contextmanager
def _lines_at_once() -> Iterator[None]:
    with (
        open(1, "w", buffering=1, closefd=False) as out,
        open(2, "w", buffering=1, closefd=False) as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        yield
