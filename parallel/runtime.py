"""Rank, device, process group and determinism of a process.

The launcher is torchrun (or anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT); without it the process is a world of one. `start()` is called once, before any model
is built.
"""

import datetime
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from phalanx.parallel.connections import Connections
from phalanx.parallel.fault.signals import end_with_parent
from phalanx.parallel.megatron import cpu, weight_grad
from phalanx.parallel.megatron.version import check_version


@dataclass(frozen=True)
class Runtime:
    """This process in the job. `device` is the one torch device that it owns."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    connections: Connections = field(default_factory=Connections)
    """Memory shared with other ranks, until `stop`."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def launcher_world() -> int:
    """Ranks that the launcher started, 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(
    *,
    seed: int,
    timeout: int,
    deterministic: bool,
    met: Callable[[dist.Store], None] = lambda store: None,
) -> Runtime:
    """Join the job: device, process group, random state, Megatron-Core's substitutes.

    Args:
        seed: of Python, NumPy and torch; the same on every rank.
        timeout: seconds before a stuck collective raises.
        deterministic: use deterministic algorithms only.
        met: called with the job's store as soon as there is one, before there are groups.

    Raises:
        ValueError: Megatron-Core is another release than `parallel.megatron` patches.
    """
    check_version()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A torchrun that is killed tells nobody: its ranks would go on and hold their GPUs.
        end_with_parent(signal.SIGTERM)
    rank, world = int(os.environ.get("RANK", "0")), launcher_world()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_cpu = cpu.install()
    if not on_cpu:
        weight_grad.install()
    device = torch.device("cpu") if on_cpu else torch.device("cuda", local_rank)
    if not on_cpu:
        torch.cuda.set_device(device)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if dist.is_initialized():
        met(dist.distributed_c10d._get_default_store())
    else:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        # A CUDA error is the main thread's to tell; NCCL's thread would abort the process over it.
        os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives in the flight record
        # NCCL ends the process without a word of who is at fault; parallel.fault.watchdog comes
        # first.
        limit = datetime.timedelta(seconds=timeout if on_cpu else timeout + 10)
        store: dist.Store
        if world > 1 or "MASTER_ADDR" in os.environ:
            store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=limit))
        else:
            store = dist.TCPStore("localhost", 0, 1, is_master=True, timeout=limit)
        # torchrun may give all attempts of --max-restarts one store (torch 2.11), in which the
        # ranks would find the addresses of their dead predecessors.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}", store)
        met(store)
        dist.init_process_group(
            "gloo" if on_cpu else "nccl",
            store=store,
            rank=rank,
            world_size=world,
            timeout=limit,
            device_id=None if on_cpu else device,
        )
    return Runtime(rank, world, local_rank, device)


def stop(runtime: Runtime) -> None:
    """Leave the job: first the memory that ranks share, then the process groups that made it.

    It waits for no other rank to free the memory, and destroys the groups in any case.
    """
    try:
        runtime.connections.release()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def end(runtime: Runtime) -> None:
    """Wait until no rank needs this process any more, which then ends with all that it holds.

    NCCL takes four seconds to destroy the groups of a run (two H100s), and its peers may read this
    rank's memory until the last collective is over on all of them.
    """
    if runtime.world == 1:
        return
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    store = dist.distributed_c10d._get_default_store()
    _count(store, "ended", runtime.world)
    # The others still ask the store, which lives in rank 0, whether all have come.
    if runtime.is_main:
        _count(store, "left", runtime.world)
    else:
        store.add("left", 1)


def _count(store: dist.Store, name: str, world: int) -> None:
    """Wait until every rank has been counted, or for `_PATIENCE` seconds: who died is told."""
    count, until = store.add(name, 1), time.monotonic() + _PATIENCE
    while count < world and time.monotonic() < until:
        time.sleep(0.01)
        count = store.add(name, 0)


_PATIENCE = 10.0
