"""What a process is: rank, device, process group, signals, determinism.

The launcher is torchrun (or anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT); without it the process is a world of one. `start()` is called once, before any model
is built.
"""

import datetime
import os
import random
import signal
import socket
from dataclasses import dataclass
from types import FrameType

import numpy as np
import torch
import torch.distributed as dist

from parallel import adam, cpu

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class Runtime:
    """This process in the job. `device` is the one torch device that it owns."""

    rank: int
    world: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def launcher_world() -> int:
    """Ranks that the launcher started, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(*, seed: int, timeout: int, deterministic: bool) -> Runtime:
    """Join the job: device, process group, random state, Megatron-Core's substitutes.

    Args:
        seed: of Python, NumPy and torch; the same on every rank.
        timeout: seconds before a stuck collective raises.
        deterministic: use deterministic algorithms only.
    """
    rank, world = int(os.environ.get("RANK", "0")), launcher_world()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_cpu = cpu.install()
    adam.install()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", local_rank)
    if not on_cpu:
        torch.cuda.set_device(device)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if not dist.is_initialized():
        if "MASTER_ADDR" not in os.environ:
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(_free_port()))
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        dist.init_process_group(
            "gloo" if on_cpu else "nccl",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout),
            device_id=None if on_cpu else device,
        )
    return Runtime(rank, world, local_rank, device)


def stop() -> None:
    """Leave the job."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])


class StopSignal:
    """Context in which SIGTERM, SIGUSR1 and SIGINT ask for a clean stop at the next step.

    A second SIGINT is a KeyboardInterrupt, as a person at a terminal expects.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignal":
        for s in _STOP_SIGNALS:
            self._previous[s] = signal.signal(s, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for s, handler in self._previous.items():
            signal.signal(s, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
