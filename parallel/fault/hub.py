"""The watchdog's place in rank 0's guard: hears all ranks, and decides who is at fault.

Messages are JSON, one a line. From a rank: who it is, with the token of this launch; what it is
doing, a few times a second; that it failed, or is done. To all ranks: what rank 0 is doing, as a
sign of life, and the verdict, which is the last. Without the token nothing is believed, little is
kept, and the connection is closed after `_HELLO` seconds.
"""

import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from phalanx.parallel.fault.verdict import Member, Verdict, Where, blame

_HELLO = 10.0  # seconds in which a connection has to say who it is
_STRANGERS = 64  # connections, besides one a rank, that may be about to do so
_LONGEST_HELLO, _LONGEST = 4096, 1 << 16  # bytes of a line of a stranger, and of a rank


class Hub:
    """A thread that runs until it has decided, or all ranks are done.

    Args:
        timeout: as in `blame`, in seconds.
        period: between signs of life, in seconds.
        addresses: of this host, the first that it has is listened on ("" is all), or OSError.
    """

    def __init__(
        self, world: int, timeout: float, period: float, addresses: Sequence[str] = ("127.0.0.1",)
    ) -> None:
        self._world, self._timeout, self._period = world, timeout, period
        self._server = _listening(addresses, world)
        self._server.setblocking(False)
        self.address, self.port = self._server.getsockname()[:2]
        self.token = secrets.token_hex(16)
        self._members: dict[int, Member] = {}
        self._lines: dict[socket.socket, _Lines] = {}
        self.thread = threading.Thread(target=self._serve, name="watchdog-hub", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._server:
            selector.register(self._server, selectors.EVENT_READ)
            self._selector, last_sent = selector, 0.0
            verdict: Verdict | None = None
            while verdict is None and not self._all_left():
                for key, _ in selector.select(until_next(last_sent, self._period)):
                    if key.fileobj is self._server:
                        self._accept()
                    elif key.fileobj in self._lines:  # not closed a moment ago
                        self._hear(key.fileobj)
                now = time.monotonic()
                self._show_out(now)
                verdict = blame(self._members, now, self._timeout)
                if verdict is None and now - last_sent >= self._period:
                    last_sent = now
                    self._tell({"at": self._at(), "met": len(self._members) == self._world})
            if verdict is not None:
                self._tell(asdict(verdict) | {"speaker": self._speaker(verdict)})
        for connection in self._lines:
            connection.close()

    def _all_left(self) -> bool:
        return len(self._members) == self._world and all(m.left for m in self._members.values())

    def _at(self) -> str:
        return self._members[0].at if 0 in self._members else "start"

    def _speaker(self, verdict: Verdict) -> int:
        well = [rank for rank, m in self._members.items() if m.gone is None and not m.left]
        return min((rank for rank in well if rank != verdict.where.rank), default=0)

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # it is gone again, or there are too many open files
            time.sleep(0.01)
            return
        connection.setblocking(False)  # a stopped rank must not stop the hub
        self._lines[connection] = _Lines(time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ)

    def _show_out(self, now: float) -> None:
        """Close connections that do not say who they are, the oldest first if there are many."""
        strangers = [(c, lines) for c, lines in self._lines.items() if lines.member is None]
        many = len(strangers) - self._world - _STRANGERS
        for i, (connection, lines) in enumerate(strangers):
            if i < many or now - lines.came > _HELLO:
                self._close(connection)

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
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            data = b""  # not one of us
        if not data:
            self._close(connection)

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        lines = self._lines.pop(connection)
        connection.close()
        if lines.member is not None and not lines.member.left:
            lines.member.gone = time.monotonic()

    def _note(self, lines: "_Lines", message: dict[str, Any]) -> None:
        now = time.monotonic()
        if lines.member is None:
            if not hmac.compare_digest(message["token"].encode(), self.token.encode()):
                raise ValueError("a stranger")
            where = Where(**message["where"])
            if where.rank not in range(self._world) or where.rank in self._members:
                raise ValueError("no rank that is still to come")
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


def until_next(last: float, period: float) -> float:
    """Seconds to wait for messages until the next sign of life is due, `period` after the `last`.

    A whole period after each message would be two periods apart, which is as long as the silence of
    a stopped rank (`QUIET`). One that is overdue cannot be given.
    """
    left = last + period - time.monotonic()
    return left if left > 0 else period


class _Lines:
    """Lines that a connection has sent, their rank, and their time of arrival."""

    def __init__(self, came: float) -> None:
        self.member: Member | None = None
        self.came = came
        self._rest = b""

    def take(self, data: bytes) -> list[dict[str, Any]]:
        """Messages that are complete now; ValueError: one is none, or longer than any of ours."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        longest = _LONGEST_HELLO if self.member is None else _LONGEST
        if max(map(len, [*lines, self._rest])) > longest:
            raise ValueError("a line without end")
        return [json.loads(line) for line in lines]


def _listening(addresses: Sequence[str], backlog: int) -> socket.socket:
    """A server socket on the first of `addresses` that can be had."""
    for address in addresses[:-1]:
        with suppress(OSError):
            return _server(address, backlog)
    return _server(addresses[-1], backlog)


def _server(address: str, backlog: int) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
        )
    family = socket.getaddrinfo(address or "0.0.0.0", 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((address, 0), family=family, backlog=backlog)
