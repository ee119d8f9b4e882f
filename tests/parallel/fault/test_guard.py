"""Messages of a rank reach its guard, however busy the guard is."""

import json
import socket
import threading
import time

import pytest

from phalanx.parallel.fault.guard import Guard


@pytest.fixture
def ends() -> tuple[Guard, socket.socket]:
    """A guard's place in a rank, with the other end of its connection."""
    guard = Guard()
    guard._socket, there = socket.socketpair()
    guard._sending, guard._rest = threading.Lock(), b""
    return guard, there


def test_words_wait_for_a_guard_that_does_not_read(ends: tuple[Guard, socket.socket]) -> None:
    """One thread of the rank listens for short times, another one sends more than is buffered."""
    guard, there = ends
    words = [{"do": "state", "at": f"{n} {'x' * 100}"} for n in range(3000)] + [{"do": "left"}]
    assert guard.receive(0.01) == []

    def send() -> None:
        for word in words:
            guard.send(word)
        guard._socket.close()

    sender = threading.Thread(target=send)
    sender.start()
    time.sleep(0.3)  # of a machine with other things to do
    assert sender.is_alive()
    with there, there.makefile("rb") as lines:
        assert [json.loads(line) for line in lines] == words
    sender.join()


def test_what_the_guard_says(ends: tuple[Guard, socket.socket]) -> None:
    guard, there = ends
    there.sendall(b'{"a": 1}\n{"b": ')
    assert guard.receive(5.0) == [{"a": 1}]
    assert guard.receive(0.0) == []
    there.sendall(b"2}\n")
    assert guard.ask({"do": "host"}) == {"b": 2}
    there.close()
    with pytest.raises(EOFError, match="guard is gone"):
        guard.receive(5.0)
    guard._socket.close()
    with pytest.raises(EOFError, match="guard is gone"):
        guard.receive(5.0)
