"""Rank 0's side of the watchdog: hears all ranks, and decides who is at fault.

Messages are JSON, one a line. From a rank: who it is, with the token of this launch; what it is
doing, a few times a second; that it failed, or is done. To all ranks: what rank 0 is doing, as a
sign of life, and the verdict, which is the last.
"""

import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from parallel.blame import Member, Verdict, Where, blame
from parallel.progress import now as progress

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def closed_in_forks(connection: socket.socket) -> None:
    """A fork that outlives its rank must not hold the rank's connection open."""
    _sockets.add(connection)


def _close() -> None:
    for connection in list(_sockets):
        connection.close()


os.register_at_fork(after_in_child=_close)


class Hub:
    """A thread that runs until it has decided, or all ranks are done.

    Args:
        world: ranks.
        timeout: as in `blame`, in seconds.
        period: between signs of life, in seconds.
    """

    def __init__(self, world: int, timeout: float, period: float) -> None:
        self._world, self._timeout, self._period = world, timeout, period
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, backlog=world, dualstack_ipv6=dual
        )
        self.port, self.token = self._server.getsockname()[1], secrets.token_hex(16)
        self._members: dict[int, Member] = {}
        self._lines: dict[socket.socket, _Lines] = {}
        closed_in_forks(self._server)
        self.thread = threading.Thread(target=self._serve, name="watchdog-hub", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._server:
            selector.register(self._server, selectors.EVENT_READ)
            self._selector, told = selector, 0.0
            verdict: Verdict | None = None
            while verdict is None and not self._all_left():
                for key, _ in selector.select(self._period):
                    if key.fileobj is self._server:
                        self._accept()
                    else:
                        self._hear(key.fileobj)
                now = time.monotonic()
                verdict = blame(self._members, now, self._timeout)
                if verdict is None and now - told >= self._period:
                    told = now
                    self._tell({"at": progress().at})
            if verdict is not None:
                self._tell(asdict(verdict))
        for connection in self._lines:
            connection.close()

    def _all_left(self) -> bool:
        return len(self._members) == self._world and all(m.left for m in self._members.values())

    def _accept(self) -> None:
        connection, _ = self._server.accept()
        connection.setblocking(False)  # a stopped rank must not stop the hub
        closed_in_forks(connection)
        self._lines[connection] = _Lines()
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: Any) -> None:
        try:
            data = connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        lines = self._lines[connection]
        try:
            for message in lines.take(data):
                self._note(lines, message)
        except (ValueError, KeyError, TypeError):
            data = b""  # not one of us
        if not data:
            self._selector.unregister(connection)
            del self._lines[connection]
            connection.close()
            if lines.member is not None and not lines.member.left:
                lines.member.gone = time.monotonic()

    def _note(self, lines: "_Lines", message: dict[str, Any]) -> None:
        now = time.monotonic()
        if lines.member is None:
            if message["token"] != self.token:
                raise ValueError("a stranger")
            where = Where(**message["where"])
            lines.member = self._members[where.rank] = Member(where, now)
            return
        member = lines.member
        member.heard = now
        if "serial" in message:
            member.at, member.serial = message["at"], message["serial"]
            member.since, member.limited = now - message["since"], message["limited"]
        elif "failed" in message:
            member.failed, member.own = now, message["own"]
            member.reason = message["reason"]
        elif "left" in message:
            member.left = True

    def _tell(self, message: dict[str, Any]) -> None:
        """To all ranks, rank 0 last: its process may end when it has heard."""
        data = json.dumps(message).encode() + b"\n"
        known = [(lines.member.where.rank, c) for c, lines in self._lines.items() if lines.member]
        for _, connection in sorted(known, key=lambda item: -item[0]):
            with suppress(OSError):
                connection.send(data)


class _Lines:
    """What a connection has sent, and whose it is."""

    def __init__(self) -> None:
        self.member: Member | None = None
        self._rest = b""

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """Messages that are complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]
