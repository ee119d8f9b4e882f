"""Notices dead, stopped and hanging ranks, names the one at fault, and ends all of them.

A thread of each rank tells its guard (parallel.fault.guard) what the rank is doing; the guards tell
rank 0's, whose hub decides who is at fault (parallel.fault.verdict), and bring its verdict back.
Each living rank then writes its post-mortem to the run folder and exits with `LOST`; one that
cannot is ended by its guard. A connection that ends is a dead process, noticed at once; one that is
still is a stopped process or a lost host. Training never waits for any of this, which never touches
the device, and forks do not have it.

nvidia-resiliency-ext needs its own launcher, and its monitors judge their own ranks by timeouts. A
hanging rank keeps all others waiting in their next collective: who began is seen only by comparing
what all are doing. This also runs under srun and on CPUs.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import psutil
import torch.distributed as dist

from phalanx.configs.redact import redacted
from phalanx.parallel.fault import launcher, post_mortem
from phalanx.parallel.fault.activity import current_progress
from phalanx.parallel.fault.guard import LOST, Guard
from phalanx.parallel.fault.verdict import Verdict, Where, error_line

_GRACE = 10.0  # seconds in which an error that all ranks raise has surely reached this one as well
_BREAK = 0.3  # seconds in which a collective with a dead rank breaks here; its error tells where
_WRITES = 2.5  # seconds in which stacks and collectives are written, if the disk does not hang


class Watchdog:
    """Watches the ranks of the job, from the time they can reach a store. One rank watches nothing.

    Making one is collective.

    Args:
        store: of the job, in which ranks find rank 0's guard. Groups need not be there yet.
        timeout: seconds without life or progress that end the job.
        folder: of the run; a post-mortem goes to `failures/<time of launch>` in it.
        speak: tells the user and the launcher a line.

    Raises:
        ValueError: the ranks do not find each other.
    """

    def __init__(
        self,
        guard: Guard,
        store: dist.Store,
        rank: int,
        world: int,
        timeout: float,
        folder: Path,
        emit: Callable[[str], None],
    ) -> None:
        self._guard, self._rank, self._world, self._emit = guard, rank, world, emit
        self._period = min(0.5, timeout / 20)
        self._error: Exception | None = None
        self._own = False
        self._reported, self._decided, self._closing = (threading.Event() for _ in range(3))
        self._verdict: Verdict | None = None
        if world == 1:
            return
        process = psutil.Process()
        self._where = Where(rank, socket.gethostname(), process.pid, process.create_time())
        try:
            self._meet(store, timeout, folder)
        except (dist.DistError, RuntimeError, EOFError) as error:
            raise ValueError(f"the ranks did not find each other: {error}") from None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _meet(self, store: dist.Store, timeout: float, folder: Path) -> None:
        store.set(f"guard/{self._rank}", _place())
        if self._rank == 0:
            one_host = len({store.get(f"guard/{rank}") for rank in range(self._world)}) == 1
            given = os.environ.get("MASTER_ADDR", "localhost")
            at = ["127.0.0.1"] if one_host else [*_reachable(given), ""]
            hub = self._guard.ask(
                {"do": "host", "world": self._world, "timeout": timeout, "addresses": at}
            )
            if "refused" in hub:
                raise RuntimeError(hub["refused"])
            anywhere = hub["address"] in ("::", "0.0.0.0")
            address = (given if anywhere else hub["address"], hub["port"], hub["token"])
            launch = time.strftime("%Y%m%d-%H%M%S")
            store.set("guard/hub", json.dumps([address, launch, asdict(self._where)]))
        address, launch, rank_0 = json.loads(store.get("guard/hub"))
        self._folder = (folder / "failures" / launch).absolute()
        joined = self._guard.ask(
            {
                **{"do": "join", "hub": address, "timeout": timeout},
                **{"folder": str(self._folder), "ranks": [asdict(self._where), rank_0]},
            }
        )
        if "refused" in joined:
            where = f"{rank_0['host']} at {address[0]}:{address[1]}"
            raise RuntimeError(
                f"cannot reach rank 0, {where} (set MASTER_ADDR to its host): {joined['refused']}"
            )

    def close(self) -> None:
        """This rank is done. Rank 0's guard goes on until the others are."""
        if self._world == 1:
            return
        self._closing.set()
        self._guard.send({"do": "left"})
        self._guard.end_receiving()  # wakes the thread
        self._thread.join()

    def report(self, error: Exception, reason: str, *, own: bool) -> bool:
        """This rank cannot go on; is it the one to say so?

        Waits until the hub has decided who is at fault. If this rank only suffers from another one,
        the process ends here, with `LOST`.

        Args:
            error: for the post-mortem; the watchdog formats its traceback, which reads from the
                disk.
            reason: in a line, told if nobody is found to be at fault.
            own: whether something went wrong here, rather than in a collective.
        """
        if self._world == 1:
            return True
        self._error, self._own = error, own
        self._reported.set()
        reason = redacted(reason)[:2000]  # other ranks tell it and write it down
        self._guard.send({"do": "failed", "failed": True, "own": own, "reason": reason})
        self._decided.wait()
        assert self._verdict is not None
        if not self._leaves_by_itself(self._verdict):
            self._thread.join()  # which ends the process
        return self._verdict.where.rank == self._rank

    def _leaves_by_itself(self, verdict: Verdict) -> bool:
        """Return whether this rank's error is the cause, or as informative as the cause."""
        return self._own and (verdict.kind == "failed" or verdict.where.rank == self._rank)

    # --- the thread -------------------------------------------------------------------------------

    def _watch(self) -> None:
        found = self._wait_for_verdict()
        if found is None:
            return
        verdict, speaker = found
        self._verdict = verdict
        grace = _GRACE if verdict.kind == "failed" else _BREAK
        self._guard.send({"do": "ending", "limit": grace + _WRITES})
        self._decided.set()
        self._reported.wait(grace)
        if self._leaves_by_itself(verdict):
            # The main thread ends this rank, with a code of its own.
            self._guard.send({"do": "ending", "limit": _GRACE})
            return
        if verdict.kind != "failed" and self._rank == speaker:
            self._emit(error_line(verdict.text, self._folder))
            self._guard.send({"do": "told"})
        else:  # torchrun reports the rank that ends first, which need not be the one at fault
            launcher.tell(error_line(verdict.text, self._folder))
        post_mortem.write(self._folder, self._rank, verdict.text, self._error)
        if verdict.kind == "silent" and verdict.where.rank != self._rank:
            post_mortem.end_stopped(self._folder, verdict.where)
        os._exit(LOST)

    def _wait_for_verdict(self) -> tuple[Verdict, int] | None:
        """The verdict and the rank that tells it, or None when this rank is done."""
        try:
            while not self._closing.is_set():
                state = current_progress()
                age = time.monotonic() - state.since
                self._guard.send({"do": "state"} | state._asdict() | {"since": age})
                for message in self._guard.receive(self._period):
                    speaker = message.pop("speaker")
                    return Verdict(**message | {"where": Where(**message["where"])}), speaker
        except EOFError:
            if not self._closing.is_set():
                text = f"{self._where} has lost its guard process, which somebody killed"
                return Verdict(self._where, "died", text), self._rank
        return None


def _place() -> str:
    """Return an identifier that processes share which reach each other by 127.0.0.1."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    parts = (socket.gethostname(), boot.read_text().strip() if boot.exists() else "")
    return json.dumps([*parts, os.readlink(network) if network.exists() else ""])


def _reachable(name: str) -> list[str]:
    """Addresses of this host that others can reach: those of `name`, which they use, or its own."""
    found = []
    for host in (name, socket.gethostname()):
        try:
            known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError:
            continue
        addresses = [str(info[4][0]) for info in known]
        found += [a for a in addresses if not a.startswith(("127.", "::1"))]
    return found
