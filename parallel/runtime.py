"""Rank, device, process group and determinism of a process.

The launcher is torchrun (or anything that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT); without it the process is a world of one.
"""

import datetime
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from phalanx.parallel.connections import Connections
from phalanx.parallel.fault.launcher import launcher_world
from phalanx.parallel.fault.signals import REPLACED, end_with_parent
from phalanx.parallel.megatron import cpu, weight_grad
from phalanx.parallel.megatron.imports import check_version


@dataclass(frozen=True)
class Runtime:
    """This process in the job. `device` is the one torch device that it owns."""

    rank: int
    world: int
    local_rank: int
    device: torch.device
    connections: Connections = field(default_factory=Connections)  # shared with other ranks

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def device_here(local_rank: int) -> torch.device:
    """The device of a rank, on a CPU with Megatron-Core's substitutes; ValueError without a GPU."""
    if cpu.install():
        return torch.device("cpu")
    weight_grad.install()
    if local_rank >= (gpus := torch.cuda.device_count()):
        raise ValueError(
            f"{local_rank + 1} or more ranks were started on {socket.gethostname()}, and torch "
            f"sees {gpus} of its GPUs: start with torchrun --nproc-per-node {gpus}"
        )
    return torch.device("cuda", local_rank)


def start(
    *,
    seed: int,
    timeout: int,
    deterministic: bool,
    met: Callable[[dist.Store], None] = lambda store: None,
) -> Runtime:
    """Join the job: device, process group, random state, Megatron-Core's substitutes.

    Called once, before any model is built.

    Args:
        timeout: seconds before a stuck collective raises.
        met: called with the job's store as soon as there is one, before there are groups.

    Raises:
        ValueError: Megatron-Core is another release than `parallel.megatron` patches, the host has
            fewer GPUs than ranks, or the ranks cannot meet.
    """
    check_version()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A torchrun that is killed tells nobody: its ranks would go on and hold their GPUs.
        end_with_parent(signal.SIGTERM)
    rank, world = int(os.environ.get("RANK", "0")), launcher_world()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_here(local_rank)
    on_cpu = device.type == "cpu"
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
        store = _meet(rank, world, limit)
        # torchrun may give all attempts of --max-restarts one store (torch 2.11), in which the
        # ranks would find the addresses of their dead predecessors; so would those of a next phase.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}{os.environ.get(REPLACED, '')}", store)
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


def _meet(rank: int, world: int, limit: datetime.timedelta) -> dist.Store:
    """The job's store, in rank 0 or its launcher; ValueError: port in use, or no connection."""
    if world == 1 and "MASTER_ADDR" not in os.environ:
        return dist.TCPStore("localhost", 0, 1, is_master=True, timeout=limit)
    if lacking := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise ValueError(f"{' and '.join(lacking)} must be set beside WORLD_SIZE: {_LAUNCH}")
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    try:
        store: dist.Store = next(dist.rendezvous("env://", rank, world, timeout=limit))[0]
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            reason = f"port {port} of {socket.gethostname()} is in use, where rank 0 listens"
            raise ValueError(f"{reason}: set MASTER_PORT to a free one, or {_LAUNCH}") from None
        first = (str(error).splitlines() or [repr(error)])[0]
        reason = f"cannot reach rank 0 at MASTER_ADDR={host} MASTER_PORT={port}: {first}"
        raise ValueError(f"{reason}; set both on every host to those of rank 0") from None
    return store


_LAUNCH = (
    "start with torchrun --standalone on one host, or with --rdzv-backend c10d --rdzv-endpoint "
    "HOST:PORT on several"
)


def stop(runtime: Runtime) -> None:
    """Leave the job: first the memory that ranks share, then the process groups that made it.

    It waits for no other rank, and destroys the groups in any case.
    """
    try:
        runtime.connections.release()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def end(runtime: Runtime) -> None:
    """Wait until no rank needs this process any more, which then ends with all that it holds.

    NCCL takes four seconds to destroy a run's groups (two H100s), and peers may read this rank's
    memory until the last collective is over.
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
