"""Rank 0's hub with hand-made ranks on its sockets."""

import errno
import itertools
import json
import os
import socket
import statistics
import time
from typing import Any

import pytest

from phalanx.parallel.fault import hub as hub_module
from phalanx.parallel.fault.guard import closed_in_forks
from phalanx.parallel.fault.hub import Hub


def talk(hub: Hub, *messages: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("localhost", hub.port), timeout=10)
    for message in messages:
        connection.sendall(json.dumps(message).encode() + b"\n")
    return connection


def hello(hub: Hub, rank: int) -> dict[str, Any]:
    where = {"rank": rank, "host": "node", "pid": 100 + rank, "born": 0.0}
    return {"token": hub.token, "where": where}


@pytest.mark.parametrize(
    "first",
    [
        *[
            b"GET / HTTP/1.1\r\n",
            b'{"token": "guess", "where": {}}\n',
            b"[]\n",
            b'{"left": true}\n',
        ],
        b"[" * 4000 + b"\n",  # deeper than a parser's stack
        b'{"token": 5, "where": {}}\n',
        b"x" * 5000,  # and no end of the line in sight
    ],
    ids=lambda first: first[:8],
)
def test_strangers_are_shown_out(first: bytes) -> None:
    hub = Hub(1, timeout=5, period=0.02)
    with talk(hub) as stranger:
        stranger.sendall(first)
        assert stranger.recv(100) == b""
    with talk(hub, hello(hub, 0), {"left": True}):
        hub.thread.join(5)
    assert not hub.thread.is_alive()


def test_only_this_host_is_listened_to() -> None:
    hub = Hub(1, timeout=5, period=0.02)
    assert hub._server.getsockname()[0] == hub.address == "127.0.0.1"
    elsewhere = Hub(1, timeout=5, period=0.02, addresses=["192.0.2.1", "127.0.0.2"])
    assert elsewhere.address == "127.0.0.2"  # the first is no address of this host
    for one, rank in ((hub, 0), (elsewhere, 0)):
        with socket.create_connection((one.address, one.port), timeout=10) as connection:
            for message in (hello(one, rank), {"left": True}):
                connection.sendall(json.dumps(message).encode() + b"\n")
            one.thread.join(5)


def test_signs_of_life_come_on_time_though_messages_come_before_them() -> None:
    """Else they would be as far apart as the silence of a rank that is stopped."""
    period, heard = 0.4, [time.monotonic()]
    hub = Hub(1, timeout=60, period=period)
    with talk(hub, hello(hub, 0)) as rank:
        for _ in range(5):
            assert b"met" in rank.recv(1 << 12)
            heard.append(time.monotonic())
            time.sleep(0.8 * period)  # the next message comes shortly before the next sign is due
            rank.sendall(b'{"serial": 1, "at": "step", "since": 0, "limited": false}\n')
        rank.sendall(b'{"left": true}\n')
        hub.thread.join(5)
    gaps = [later - earlier for earlier, later in itertools.pairwise(heard[1:])]
    assert statistics.median(gaps) < 1.4 * period, gaps


def test_strangers_who_wait_and_come_in_crowds_are_shown_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "_HELLO", 0.3)
    monkeypatch.setattr(hub_module, "_STRANGERS", 3)
    hub = Hub(1, timeout=60, period=0.02)
    with talk(hub) as silent:
        assert silent.recv(1) == b""  # after that time
    crowd = [talk(hub) for _ in range(12)]
    first = time.monotonic()
    assert crowd[0].recv(1) == b"" and time.monotonic() - first < 5
    with talk(hub, hello(hub, 0), {"left": True}):
        hub.thread.join(5)
    for stranger in crowd:
        stranger.close()
    assert not hub.thread.is_alive()


def test_a_rank_cannot_be_taken_for_another() -> None:
    hub = Hub(2, timeout=60, period=0.02)
    with talk(hub, hello(hub, 0)) as rank_0:
        rank_0.recv(100)
        for rank in (0, 2, -1):
            with talk(hub, hello(hub, rank)) as second:
                assert second.recv(1) == b""
        with talk(hub, hello(hub, 1), {"left": True}):
            rank_0.sendall(b'{"left": true}\n')
            hub.thread.join(5)
    assert not hub.thread.is_alive()


def test_connections_that_cannot_be_accepted_do_not_end_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = iter([ConnectionAbortedError(), OSError(errno.EMFILE, "Too many open files")])
    accept = socket.socket.accept

    def failing(server: socket.socket) -> Any:
        if error := next(errors, None):
            raise error
        return accept(server)

    monkeypatch.setattr(socket.socket, "accept", failing)
    hub = Hub(1, timeout=5, period=0.02)
    with talk(hub, hello(hub, 0), {"left": True}):
        hub.thread.join(5)
    assert not hub.thread.is_alive() and next(errors, None) is None


def test_the_others_hear_who_died() -> None:
    hub = Hub(3, timeout=60, period=0.02)
    state = {"at": "step 2: data", "serial": 4, "since": 0.1, "limited": True}
    ranks = [talk(hub, hello(hub, rank), state) for rank in range(3)]
    ranks[2].recv(100)  # the hub knows this one
    ranks[2].close()
    for rank in ranks[:2]:
        with rank, rank.makefile() as lines:
            verdict = next(message for message in map(json.loads, lines) if "text" in message)
        assert verdict["kind"] == "died" and verdict["where"]["rank"] == 2
        assert (
            verdict["text"] == "rank 2 (node, pid 102) died; it was last heard of in step 2: data"
        )


def test_a_fork_does_not_keep_a_connection_open() -> None:
    here, there = socket.socketpair()
    closed_in_forks(here)
    ready, go_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(ready, 1)
        os._exit(0)
    here.close()
    there.settimeout(5)
    assert there.recv(1) == b""
    os.write(go_on, b".")
    os.waitpid(child, 0)
