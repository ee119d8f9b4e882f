"""Rank 0's hub with hand-made ranks on its sockets."""

import json
import os
import socket
from typing import Any

import pytest

from parallel.hub import Hub, closed_in_forks


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
    [b"GET / HTTP/1.1\r\n", b'{"token": "guess", "where": {}}\n', b"[]\n", b'{"left": true}\n'],
)
def test_strangers_are_shown_out(first: bytes) -> None:
    hub = Hub(1, timeout=5, period=0.02)
    with talk(hub) as stranger:
        stranger.sendall(first)
        assert stranger.recv(100) == b""
    with talk(hub, hello(hub, 0), {"left": True}):
        hub.thread.join(5)
    assert not hub.thread.is_alive()


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
