"""Faults of `run.inject` as they happen: on the host when a step begins, or to its gradients.

A fault happens once in the life of a run, whatever restarts, resumes and rollbacks come after. It
is recorded in the run folder before it happens, as a killed process records nothing.
"""

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import NoReturn

from phalanx.configs.inject import GRADIENT, Fault, parse
from phalanx.configs.schema import RunConfig
from phalanx.parallel.checkpoint import commit
from phalanx.parallel.fault.agreement import gather

FOLDER = "injected"
"""In the run folder: a file for each fault that has happened."""


class Injected(RuntimeError):
    """The error of a `raise` that `run.inject` asked for."""


class Faults:
    """The faults of this rank that are still to come. Making one is collective.

    Args:
        run: section of the configuration.
        rank: this one.
        folder: of the run.
    """

    def __init__(self, run: RunConfig, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder / FOLDER
        faults = [parse(text) for text in run.inject]
        here = sorted(path.name for path in self._folder.glob("*")) if faults else []
        # Folders of hosts need not be shared.
        happened = {name for names in (gather(here) if faults else []) for name in names}
        self._past = [fault for fault in faults if str(fault) in happened]
        self._future = [fault for fault in faults if str(fault) not in happened]

    def told(self) -> str:
        """One line on what is to come; empty if nothing was asked for."""
        lines = []
        if self._future:
            lines.append(f"to come {', '.join(map(str, self._future))}")
        if self._past:
            again = f"delete {self._folder} to have them again"
            lines.append(f"happened already {', '.join(map(str, self._past))} ({again})")
        return f"warning: faults are injected (run.inject): {'; '.join(lines)}" if lines else ""

    def act(self, step: int) -> None:
        """Have what happens to this process when a step begins."""
        for fault in self._due(step):
            if fault.kind not in GRADIENT:
                self._record(fault)
                _happen(fault)

    def factor(self, step: int) -> float:
        """Factor of this rank's gradients in a step; 1 without a fault."""
        factor = 1.0
        for fault in self._due(step):
            if fault.kind in GRADIENT:
                self._record(fault)
                factor *= GRADIENT[fault.kind]
        return factor

    def _due(self, step: int) -> list[Fault]:
        mine = (None, self._rank)
        return [fault for fault in self._future if fault.step == step and fault.rank in mine]

    def _record(self, fault: Fault) -> None:
        """On the disk, before anything happens."""
        self._future.remove(fault)
        self._past.append(fault)
        about = {"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "monotonic": time.monotonic()}
        about |= {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / str(fault)).open("a", encoding="utf-8") as file:
            file.write(json.dumps(about) + "\n")
            file.flush()
            os.fsync(file.fileno())
        commit.sync(self._folder)


def _happen(fault: Fault) -> None:
    """A fault of a process."""
    if fault.kind == "raise":
        raise Injected(f"run.inject={fault}")
    if fault.kind == "hang":
        _hang()
    if fault.kind == "exit":
        os._exit(1)
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
    os.kill(os.getpid(), signals[fault.kind])


def _hang() -> NoReturn:
    while True:
        time.sleep(60)
