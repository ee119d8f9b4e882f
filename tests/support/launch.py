"""Ranks of a run as separate processes, which tests may stop and kill.

They are forked from a server that has imported torch and Megatron-Core, so that a launch takes
about a second; their output goes to files. Unlike torchrun, nothing signals the other ranks when
one ends: they have to notice by themselves.
"""

import contextlib
import faulthandler
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests.support.distributed import forkserver, keep_imports
from tests.support.runs import Change


class Launch:
    """`world` ranks that train; leaving the context kills those that still run."""

    def __init__(
        self, world: int, overrides: Sequence[str], folder: Path, change: Change | None = None
    ) -> None:
        context = forkserver()
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / f"{rank}.txt" for rank in range(world)]
        self.ended: dict[int, float] = {}
        """time.monotonic() when a rank was seen to have ended."""
        port = free_port()
        self.ranks = [
            context.Process(target=_main, args=(rank, world, port, list(overrides), file, change))
            for rank, file in enumerate(self.files)
        ]

    def __enter__(self) -> "Launch":
        for process in self.ranks:
            process.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        return self.ranks[rank].pid or 0

    def wait(self, timeout: float = 120) -> list[int | None]:
        """Exit codes; None for a rank that still runs after `timeout` seconds."""
        until = time.monotonic() + timeout
        left = {process.sentinel: rank for rank, process in enumerate(self.ranks)}
        while left and time.monotonic() < until:
            for sentinel in connection.wait(list(left), until - time.monotonic()):
                rank = left.pop(sentinel)  # type: ignore[call-overload]
                self.ended[rank] = time.monotonic()
                self.ranks[rank].join()
        return [process.exitcode for process in self.ranks]

    def output(self, rank: int) -> str:
        """Output of a rank."""
        return self.files[rank].read_text() if self.files[rank].exists() else ""

    def until(self, seen: Callable[[], Any], timeout: float = 60) -> None:
        """Wait until `seen` is true."""
        end = time.monotonic() + timeout
        while not seen():
            printed = "\n".join(map(self.output, range(len(self.ranks))))
            assert time.monotonic() < end and all(p.is_alive() for p in self.ranks), printed
            time.sleep(0.02)


def _main(
    rank: int, world: int, port: int, overrides: list[str], file: Path, change: Change | None
) -> None:
    import torch

    torch.set_num_threads(1)
    keep_imports()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    out = open(file, "a", buffering=1)
    for number in (1, 2):  # for the rank's guard, too
        os.dup2(out.fileno(), number)
    faulthandler.enable(out)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        from phalanx import train

        with change(rank) if change else contextlib.nullcontext():
            train._leave(train.main(overrides, ends_process=True))


def free_port() -> int:
    """A port that only who is told it takes.

    Linux hands out ports from 32768 on to connections: one of those may be taken before rank 0,
    which has to import torch first, listens on it.
    """
    # Runs seed `random` alike in every process of pytest, which would then draw the same ports.
    draw = random.SystemRandom()
    while True:
        port = draw.randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("localhost", port))
            return port
