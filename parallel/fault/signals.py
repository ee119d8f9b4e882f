"""Signals that ask a run to end.

Imports nothing heavy: train.py enters it before torch is imported, to lose no signal.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

AGAIN = -1  # in place of an exit code: this process is to be replaced by a new one
REPLACED, PENDING = "PHALANX_REPLACED", "PHALANX_SIGNAL"
"""Environment variables: number of processes that this one has replaced, and a signal to the last.
"""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_libc = ctypes.CDLL(None)  # found before a fork, in which a thread may have held the linker's lock
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent(number: signal.Signals) -> None:
    """Have Linux send `number` to this process when the one that started it is gone."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, number)


class StopSignal:
    """Context in which SIGTERM, SIGUSR1 and SIGINT ask for a clean stop at the next step.

    Sent again they change nothing, but for a third SIGINT: a KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.received = os.environ.pop(PENDING, None)  # name of the first one
        self._interrupts = 0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignal":
        for s in _STOP_SIGNALS:
            self._previous[s] = signal.signal(s, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 2:
            raise KeyboardInterrupt
