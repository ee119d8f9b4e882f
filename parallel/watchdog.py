"""Notices dead, stopped and hanging ranks, names the one at fault, and ends all of them.

Every rank has a thread with a connection to rank 0. It tells what the rank is doing a few times a
second; rank 0's hub answers, and sends its verdict when something is wrong (parallel.blame). Each
living rank then writes its post-mortem to the run folder and exits with `LOST`. A connection that
ends is a dead process, noticed at once; one that is still is a stopped process or a lost host.
Training never waits for these threads, they never touch the device, and forks do not have them.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from parallel import post_mortem
from parallel.blame import QUIET, Verdict, Where, died, silent
from parallel.hub import Hub, closed_in_forks
from parallel.progress import now as progress

LOST = 45
"""Exit code of a rank that ends because of another one."""
_GRACE = 10.0  # seconds in which an error that all ranks raise has surely reached this one as well
_BREAK = 0.3  # seconds in which a collective with a dead rank breaks here; its error tells where


class Watchdog:
    """Of this rank, from the time the ranks can talk; collective. One rank alone has none to watch.

    Args:
        timeout: seconds without life or progress that end the job.
        folder: of the run; a post-mortem goes to `failures/<time of launch>` in it.
        speak: tells the user and the launcher a line.

    Raises:
        ValueError: rank 0 cannot be reached.
    """

    def __init__(self, timeout: float, folder: Path, speak: Callable[[str], None]) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._timeout, self._speak = timeout, speak
        self._period = min(0.5, timeout / 20)
        self._error, self._own = "", False
        self._reported, self._decided, self._closing = (threading.Event() for _ in range(3))
        self._verdict: Verdict | None = None
        self._hub: Hub | None = None
        if self._world == 1:
            return
        process = psutil.Process()
        where = Where(self._rank, socket.gethostname(), process.pid, process.create_time())
        facts: list[Any] = [None]
        if self._rank == 0:
            self._hub = Hub(self._world, timeout, self._period)
            launch = time.strftime("%Y%m%d-%H%M%S")
            facts = [(self._hub.port, self._hub.token, launch, where)]
        dist.broadcast_object_list(facts, src=0)
        port, token, launch, self._rank_0 = facts[0]
        self._folder = folder / "failures" / launch
        self._sending = threading.Lock()
        address = (os.environ.get("MASTER_ADDR", "localhost"), port)
        try:
            self._socket = socket.create_connection(address, timeout=timeout)
        except OSError as error:
            raise ValueError(
                f"no way to rank 0 at {address[0]}:{port}, set MASTER_ADDR to its host: {error}"
            ) from None
        closed_in_forks(self._socket)
        self._socket.settimeout(self._period)
        self._send({"token": token, "where": asdict(where)})
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """This rank is done. Rank 0 waits for the others: its hub has to outlive them."""
        if self._world == 1:
            return
        self._closing.set()
        with suppress(OSError):
            self._send({"left": True})
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        if self._hub is not None:
            self._hub.thread.join(self._timeout)

    def report(self, error: str, reason: str, *, own: bool) -> bool:
        """This rank cannot go on; is it the one to say so?

        Waits until rank 0 has decided who is at fault. If this rank only suffers from another one,
        the process ends here, with `LOST`.

        Args:
            error: traceback, for the post-mortem.
            reason: in a line, told if nobody is found to be at fault.
            own: whether something went wrong here, rather than in a collective.
        """
        if self._world == 1:
            return True
        self._error, self._own = error, own
        self._reported.set()
        with suppress(OSError):
            self._send({"failed": True, "own": own, "reason": reason})
        self._decided.wait()
        assert self._verdict is not None
        if not self._leaves_by_itself(self._verdict):
            self._thread.join()  # which ends the process
        return self._verdict.where.rank == self._rank

    def _leaves_by_itself(self, verdict: Verdict) -> bool:
        """Whether this rank's error is the cause, or as good as the one that is."""
        return self._own and (verdict.kind == "failed" or verdict.where.rank == self._rank)

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        verdict = self._verdict = self._wait_for_verdict()
        if verdict is None:
            return
        self._decided.set()
        self._reported.wait(_GRACE if verdict.kind == "failed" else _BREAK)
        if self._leaves_by_itself(verdict):
            return  # the main thread ends this rank, with a code of its own
        threading.Timer(_GRACE, os._exit, [LOST]).start()  # the disk may hang as well
        if verdict.kind != "failed" and self._rank == (1 if verdict.where.rank == 0 else 0):
            where = f"stacks and collectives of the ranks: {self._folder}"
            self._speak(f"error: {verdict.text}; {where}")
        post_mortem.write(self._folder, self._rank, verdict.text, self._error)
        if verdict.kind == "silent" and verdict.where.rank != self._rank:
            post_mortem.end_stopped(self._folder, verdict.where)
        os._exit(LOST)

    def _wait_for_verdict(self) -> Verdict | None:
        """The verdict, or None when this rank is done."""
        heard, at, rest = time.monotonic(), "start", b""
        with suppress(OSError):
            while not self._closing.is_set():
                state = progress()
                age = time.monotonic() - state.since
                self._send(state._asdict() | {"since": age})
                try:
                    data = self._socket.recv(1 << 16)
                except TimeoutError:
                    silence = time.monotonic() - heard
                    # If a collective failed here and rank 0 does not say why, it is rank 0.
                    if silence < (QUIET if self._reported.is_set() else self._timeout):
                        continue
                    return Verdict(self._rank_0, "silent", silent(self._rank_0, silence, at))
                if not data:
                    break
                heard = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                for message in map(json.loads, lines):
                    if "text" in message:
                        return Verdict(**message | {"where": Where(**message["where"])})
                    at = message["at"]
        if self._closing.is_set():
            return None
        return Verdict(self._rank_0, "died", died(self._rank_0, at))

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
