"""A process beside each rank, which goes on where the rank cannot.

Compilers, drivers and rendezvous run for many seconds in C, often with the interpreter lock: no
thread and no signal handler of the rank runs meanwhile. The guard (parallel.fault.guard_process)
knows neither torch nor devices. It begins before torch is imported, talks to the other guards,
keeps the lock of the run folder, and can end its rank at any moment: signal 45 has glibc's own
`_exit` as its handler, which gets the signal's number as the exit code.

Messages between the two are JSON, one a line, over a pair of sockets. Imports nothing heavy.
"""

import ctypes
import faulthandler
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import phalanx

LOST = 45  # exit code of a rank that ends because of another one, and the signal that ends it so
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
"""Signals for ranks, which a launcher sends to the guards as well: it signals process groups."""
_BEGIN = """
import sys; sys.path.insert(0, sys.argv[1])
from phalanx.parallel.fault.guard_process import main; main()
"""


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def closed_in_forks(connection: socket.socket) -> None:
    """Close the connection in a fork, which may outlive its rank and must not hold it open."""
    _sockets.add(connection)


def _close() -> None:
    for connection in list(_sockets):
        connection.close()


os.register_at_fork(after_in_child=_close)


class Guard:
    """Context in which this process has its guard, which ends when this process does."""

    def __enter__(self) -> "Guard":
        self._socket, there = socket.socketpair()
        closed_in_forks(self._socket)
        self._sending, self._rest = threading.Lock(), b""
        self._stacks = os.fdopen(os.memfd_create("stacks"), "w")
        _libc.signal(LOST, ctypes.cast(_libc._exit, ctypes.c_void_p))
        # Writes the stacks without the interpreter's lock, then calls the handler above.
        faulthandler.register(LOST, file=self._stacks, chain=True)
        descriptors = (there.fileno(), self._stacks.fileno())
        root = str(Path(phalanx.__path__[0]).parent)
        numbers = (*descriptors, os.getpid(), os.environ.get("WORLD_SIZE", "1"))
        # Those that come before the guard is ready for them wait for it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BEGIN, root, *map(str, numbers)],
                # Whoever looks for a rank by its environment must not find the guard.
                env={k: v for k, v in os.environ.items() if k != "RANK"},
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        self._process.wait()
        faulthandler.unregister(LOST)
        _libc.signal(LOST, None)
        self._stacks.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the guard, unless it is gone.

        Waits for a slow one: a lost message, as that this rank is done, would be taken for its
        death.
        """
        with self._sending, suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float | None = None) -> list[dict[str, Any]]:
        """Return the guard's messages; none for `timeout` seconds: empty. EOFError: it is gone."""
        try:
            if timeout is not None and not _readable(self._socket, timeout):
                return []
            data = self._socket.recv(1 << 16)
        except (OSError, ValueError):
            data = b""
        if not data:
            raise EOFError("this rank's guard is gone")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end_receiving(self) -> None:
        """Make `receive` raise EOFError at once, in other threads too."""
        with suppress(OSError):  # the guard is gone
            self._socket.shutdown(socket.SHUT_RD)

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The answer to a message that has one. EOFError: the guard is gone."""
        self.send(message)
        while True:
            for answer in self.receive():
                return answer


def _readable(connection: socket.socket, timeout: float) -> bool:
    """Return whether data arrives in time; the socket's own timeout would limit sends, too."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * timeout))


_libc = ctypes.CDLL(None)
_libc.signal.argtypes, _libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
