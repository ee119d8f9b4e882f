"""A rank's guard on sockets of this process."""

import os
import selectors
import socket

from phalanx.parallel.fault.guard_process import GuardProcess


def test_rank_and_hub_may_go_at_once() -> None:
    (rank, of_rank), (hub, of_hub) = socket.socketpair(), socket.socketpair()
    guard = GuardProcess(of_rank, os.getpid(), stacks=0, alone=False)
    guard._link, guard._rests[of_hub] = of_hub, b""
    guard._selector.register(of_hub, selectors.EVENT_READ, guard._hear_hub)
    rank.close()
    hub.close()
    guard.run()
    assert of_hub.fileno() == -1 and guard._verdict is None
    of_rank.close()
