"""Injected faults (`run.inject`): in the process at the start of a step, or in its gradients.

A fault happens once in a run, across restarts, resumes and rollbacks. It is recorded in the run
folder before it happens, since a killed process cannot record anything.
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

FOLDER = "injected"  # folder in the run folder, with a file for each fault that has happened


class Injected(RuntimeError):
    """Error of a fault of kind `raise`."""


class Faults:
    """Faults that have not happened yet. The constructor is collective."""

    def __init__(self, run: RunConfig, rank: int, folder: Path) -> None:
        self._rank, self._folder = rank, folder / FOLDER
        faults = [parse(text) for text in run.inject]
        recorded = sorted(path.name for path in self._folder.glob("*")) if faults else []
        # Hosts need not share the folder.
        happened = {name for names in (gather(recorded) if faults else []) for name in names}
        self._past = [fault for fault in faults if str(fault) in happened]
        self._future = [fault for fault in faults if str(fault) not in happened]

    def summary(self) -> str:
        """One line on pending and past faults; empty without faults."""
        lines = []
        if self._future:
            lines.append(f"to come {', '.join(map(str, self._future))}")
        if self._past:
            repeat = f"delete {self._folder} to repeat them"
            lines.append(f"happened already {', '.join(map(str, self._past))} ({repeat})")
        return f"warning: faults are injected (run.inject): {'; '.join(lines)}" if lines else ""

    def trigger(self, step: int) -> None:
        """Trigger the faults of this process at the start of a step."""
        for fault in self._due(step):
            if fault.kind not in GRADIENT:
                self._record(fault)
                _trigger(fault)

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
        self._future.remove(fault)
        self._past.append(fault)
        record = {"time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "monotonic": time.monotonic()}
        record |= {"rank": self._rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / str(fault)).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        commit.sync(self._folder)


def _trigger(fault: Fault) -> None:
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
