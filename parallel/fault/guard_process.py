"""Process that guards a rank (parallel.fault.guard): listens to its rank and the hub.

- It tells the hub what the rank is doing, and that it lives, for as long as the process is neither
  stopped nor gone, whatever holds its interpreter up.
- It passes on a verdict of the hub. The rank's thread ends the rank, with a post-mortem; if it does
  not begin to within a second, the guard does it from outside.
- A launcher that ends its ranks signals the guard as well. Before all ranks have met, the rank may
  be waiting for one that is dead: then the guard ends it.
- It renews the lock of the run folder, and releases it when its rank is gone, however that ended.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phalanx.configs.redact import redacted
from phalanx.parallel.fault.guard import LOST, SIGNALS
from phalanx.parallel.fault.hub import Hub, until_next
from phalanx.parallel.fault.launcher import tell
from phalanx.parallel.fault.private_files import make_private, open_private
from phalanx.parallel.fault.verdict import QUIET, Where, died, error_line, silent
from phalanx.parallel.folder_lock import Keeper

_BEGINS = 1.0  # seconds after a verdict in which a rank that runs Python has begun to end
_ENDS = 1.0  # seconds after which a process that does not take its last signal is killed
_CONNECTS = 10.0  # seconds in which rank 0's host answers


class GuardProcess:
    """Until its rank is gone, and, if the hub is here, all others are done or know why not.

    Args:
        stacks: file to which the last signal makes the rank write its stacks.
    """

    def __init__(self, rank: socket.socket, pid: int, stacks: int, alone: bool) -> None:
        self._rank, self._pid, self._stacks, self._alone = rank, pid, stacks, alone
        self._selector = selectors.DefaultSelector()
        self._selector.register(rank, selectors.EVENT_READ, self._hear_rank)
        self._rests = {rank: b""}
        self._here, self._left, self._met = True, False, False
        self._hub: Hub | None = None
        self._keeper: Keeper | None = None
        self._link: socket.socket | None = None
        self._period, self._timeout = 0.2, 60.0
        self._signalled: float | None = None
        self._state: dict[str, Any] = {}
        self._stated = self._sent = self._heard = 0.0
        self._failed = False
        self._at = "start"  # of rank 0
        self._verdict: dict[str, Any] | None = None
        self._told = False  # the rank has told the user
        self._due = 0.0  # when the rank is ended from outside
        self._struck: float | None = None  # when it was

    def run(self) -> None:
        while self._here:
            for key, _ in self._selector.select(until_next(self._sent, self._period)):
                key.data()
            self._look(time.monotonic())
        if self._hub is not None and self._link is not None:
            self._hub.thread.join(self._timeout)

    def signalled(self, *_: object) -> None:
        self._signalled = self._signalled or time.monotonic()

    # --- the rank ---------------------------------------------------------------------------------

    def _hear_rank(self) -> None:
        lines = self._read(self._rank)
        if lines is None:
            self._rank_is_gone()
            return
        for message in lines:
            do = message.pop("do")
            if do == "state":
                self._state, self._stated = message, time.monotonic()
                self._sent = 0.0
            elif do == "failed":
                self._failed = True
                self._send(self._link, message)
            elif do == "left":
                self._left = True
                self._send(self._link, message)
            elif do == "told":
                self._told = True
            elif do == "ending":
                self._due = time.monotonic() + message["limit"]
            elif do == "host":
                self._send(self._rank, self._host(**message))
            elif do == "join":
                self._send(self._rank, self._join(**message))
            elif do == "keep":
                self._keeper = Keeper(Path(message["path"]), message["token"])

    def _host(self, world: int, timeout: float, addresses: list[str]) -> dict[str, Any]:
        try:
            self._hub = Hub(world, timeout, min(0.5, timeout / 20), addresses)
        except OSError as error:
            return {"refused": str(error)}
        return {"port": self._hub.port, "token": self._hub.token, "address": self._hub.address}

    def _join(
        self, hub: tuple[str, int, str], timeout: float, folder: str, ranks: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """`ranks`: this one and rank 0."""
        address, port, token = hub
        self._timeout, self._period = timeout, min(0.5, timeout / 20)
        self._folder, self._where, self._rank_0 = Path(folder), *(Where(**r) for r in ranks)
        try:
            link = socket.create_connection((address, port), min(timeout, _CONNECTS))
        except OSError as error:
            return {"refused": str(error)}
        link.settimeout(timeout)
        self._link, self._rests[link] = link, b""
        self._send(link, {"token": token, "where": asdict(self._where)})
        self._selector.register(link, selectors.EVENT_READ, self._hear_hub)
        self._heard = time.monotonic()
        return {"joined": True}

    def _rank_is_gone(self) -> None:
        self._selector.unregister(self._rank)
        self._here = False
        if self._link is not None:
            with suppress(KeyError):
                self._selector.unregister(self._link)
            self._link.close()  # without a word, unless the rank had said that it is done
        if self._keeper is not None:
            self._keeper.release()
        if self._struck is not None and self._verdict is not None:
            self._write_stacks()

    # --- the hub ----------------------------------------------------------------------------------

    def _hear_hub(self) -> None:
        assert self._link is not None
        if not self._here:
            return  # both were heard at once, and the end of the rank has closed the link
        lines = self._read(self._link)
        if lines is None:
            self._selector.unregister(self._link)
            if self._verdict is None and not self._left:
                self._judge("died", died(self._rank_0, self._at))
            return
        self._heard = time.monotonic()
        for message in lines:
            if "text" in message:
                self._receive(message)
            else:
                self._at, self._met = message["at"], message["met"]

    def _judge(self, kind: str, text: str) -> None:
        """Rank 0's guard does not answer, so each decides for itself."""
        speaks = self._where.rank == 1 or os.environ.get("LOCAL_RANK") == "0"
        speaker = self._where.rank if speaks else -1
        where = asdict(self._rank_0)
        self._receive({"where": where, "kind": kind, "text": text, "speaker": speaker})

    def _receive(self, verdict: dict[str, Any]) -> None:
        if self._verdict is None and not self._left:
            self._verdict, self._due = verdict, time.monotonic() + _BEGINS
            self._send(self._rank, verdict)

    # --- the clock --------------------------------------------------------------------------------

    def _look(self, now: float) -> None:
        if not self._here:
            return
        if self._verdict is None and not self._left and self._link is not None:
            if self._state and now - self._sent >= self._period and not _stopped(self._pid):
                self._sent, age = now, now - self._stated
                self._send(self._link, self._state | {"since": self._state["since"] + age})
            silence = now - self._heard
            # If a collective failed here and rank 0's side does not say why, it is rank 0. In the
            # process that has the hub, silence means that it had no time.
            if self._hub is None and silence >= (QUIET if self._failed else self._timeout):
                self._judge("silent", silent(self._rank_0, silence, self._at))
        if self._verdict is not None and now >= self._due and self._struck is None:
            self._strike(now)
        waiting = not self._alone and not self._met
        if waiting and self._signalled is not None and now - self._signalled >= _BEGINS:
            self._strike(now)
        if self._struck is not None and now - self._struck >= _ENDS:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _strike(self, now: float) -> None:
        """End the rank from outside: stacks, and its exit code."""
        if self._struck is not None:
            return
        self._struck = now
        if self._verdict is not None and not self._told:
            self._tell(self._verdict)
        with suppress(ProcessLookupError):
            os.kill(self._pid, LOST)

    def _tell(self, verdict: dict[str, Any]) -> None:
        """Tell the launcher, and the user if that falls to this rank."""
        rank, failed = self._where.rank, verdict["kind"] == "failed"
        if failed and verdict["where"]["rank"] == rank:
            return  # the rank tells its own error
        line = error_line(verdict["text"], self._folder)
        if verdict["speaker"] == rank and not failed:
            print(line, file=sys.stderr, flush=True)
        tell(line)

    def _write_stacks(self) -> None:
        assert self._verdict is not None
        path = self._folder / f"rank_{self._where.rank}.txt"
        if path.exists():
            return  # it has begun to write by itself, or another one wrote that it was stopped
        at, stacks = self._state.get("at", "start"), os.pread(self._stacks, 1 << 20, 0)
        head = f"{self._verdict['text']}\n\nrank {self._where.rank} was in {at}, in a call that "
        with suppress(OSError):
            make_private(self._folder)
            with open_private(path.with_suffix(".new"), "wb") as file:
                file.write((redacted(head) + "held up Python\n\n").encode() + stacks)
            path.with_suffix(".new").replace(path)

    # --- messages ---------------------------------------------------------------------------------

    def _read(self, connection: socket.socket) -> list[dict[str, Any]] | None:
        """Messages that are complete now; None at the end of the connection."""
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._rests[connection] = (self._rests[connection] + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _send(self, connection: socket.socket | None, message: dict[str, Any]) -> None:
        if connection is not None:
            with suppress(OSError):
                connection.sendall(json.dumps(message).encode() + b"\n")


def _stopped(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


def main() -> None:
    """The process that parallel.fault.guard starts."""
    rank, stacks, pid, world = map(int, sys.argv[2:6])
    guard = GuardProcess(socket.socket(fileno=rank), pid, stacks, world == 1)
    for number in SIGNALS:  # the rank's to answer; to ignore one would lose what is pending
        signal.signal(number, guard.signalled if number == signal.SIGTERM else signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    guard.run()
