"""Facts of the ranks of a job that its plan depends on: measured once, or described.

`gather_facts` is the only exchange between ranks before a plan. `described` has the facts of Hopper
GPUs that need not exist, for dry runs and searches, and `expected` those of a launch like this
process, for `--check`.
"""

import functools
import os
import sys
from dataclasses import dataclass, field, replace

import torch

from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import CPU_RANKS, MACHINES, Machine, Rates, machine_of
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.kernels import registry
from phalanx.kernels.refusal import Refusal
from phalanx.moe.model.kernel_facts import HOPPER_PACKAGES
from phalanx.moe.model.precision import compute_dtype
from phalanx.moe.plan.free_memory import FreeMemory, free_gpu_memory, free_host_memory
from phalanx.parallel.dispatcher import nodes
from phalanx.parallel.dispatcher.transport import refusals_here, refuse_dtype
from phalanx.parallel.fault.agreement import gather
from phalanx.parallel.runtime import Runtime, device_here


@dataclass(frozen=True)
class Device:
    """Device of a rank, with what its process can import and use."""

    kind: str  # `cpu` or `cuda`
    capability: tuple[int, int] | None  # CUDA compute capability; None on `cpu`
    machine: Machine  # rates of the GPU; those of `run.machine` on a CPU or an unknown GPU
    packages: frozenset[str]  # optional packages, as in `kernels.registry.Facts`
    compiles: bool  # torch.compile is switched on
    refusals: tuple[tuple[str, Refusal], ...] = ()
    """Reason that this rank cannot serve, or None, by transport."""

    @property
    def copy_rates(self) -> Rates:
        """Rates by which copies of experts are weighed."""
        if self.kind == "cpu":
            return CPU_RANKS
        return Rates(self.machine.expert_tflops, self.machine.node_gbs)


@dataclass(frozen=True)
class RankFacts:
    """Facts of one rank."""

    rank: int
    host: str
    node: str  # name of its node: the host's, or one that a test pretends
    device: Device
    memory: FreeMemory  # free memory of its GPU, or of its host on a CPU
    host_memory: FreeMemory

    @property
    def free(self) -> int:
        """Bytes of the GPU that choices may fill. On a CPU the memory check alone limits them."""
        return self.memory.free if self.device.kind == "cuda" else sys.maxsize


@dataclass(frozen=True)
class JobFacts:
    """Facts of all ranks of a job, in their order."""

    ranks: tuple[RankFacts, ...]
    where: str = ""  # phrase before reasons, for machines that are described
    _devices: dict[Device, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = dict[Device, int]()
        hashed = set[int]()  # by identity: a job of thousands of ranks has few devices
        for r in self.ranks:
            if id(r.device) not in hashed:
                hashed.add(id(r.device))
                found.setdefault(r.device, r.rank)
        object.__setattr__(self, "_devices", found)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def devices(self) -> dict[Device, int]:
        """Different devices, with the first rank of each."""
        return self._devices

    @property
    def kind(self) -> str:
        """`cpu` or `cuda`, of all ranks."""
        return self.ranks[0].device.kind

    @property
    def machine(self) -> Machine:
        """Rates of the slowest device, by which all ranks choose."""
        return min((d.machine for d in self.devices), key=lambda m: m.expert_tflops)

    @property
    def machine_key(self) -> str | None:
        """Key of that machine in `MACHINES`; None if it is not one of them."""
        return next((key for key, m in MACHINES.items() if m.name == self.machine.name), None)

    @functools.cached_property
    def tightest(self) -> RankFacts:
        """The rank with the least free memory."""
        return min(self.ranks, key=lambda r: r.free)

    def on_host(self, rank: int) -> list[int]:
        """Ranks of a rank's host, itself included."""
        return [r.rank for r in self.ranks if r.host == self.ranks[rank].host]


def facts_here(cfg: Config, runtime: Runtime) -> RankFacts:
    """Facts of this rank, before it builds anything."""
    host, node = nodes.names_here(runtime.rank)
    return _rank(runtime.rank, host, node, _device(cfg, runtime.device), runtime.device)


def _device(cfg: Config, device: torch.device) -> Device:
    """Facts of a device, and of what this process can import."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else "CPU"
    return Device(
        kind=device.type,
        capability=torch.cuda.get_device_capability(device) if cuda else None,
        machine=MACHINES[machine_of(name, cfg.run.machine)],
        packages=registry.installed(),
        compiles=registry.compiles(),
        refusals=tuple(refusals_here(cfg.parallel.dispatch, compute_dtype(cfg)).items()),
    )


def _rank(rank: int, host: str, node: str, found: Device, device: torch.device) -> RankFacts:
    """Facts of a rank on a device of this host."""
    of_host = free_host_memory()
    memory = free_gpu_memory(device) if device.type == "cuda" else of_host
    return RankFacts(rank, host, node, found, memory, of_host)


def expected(cfg: Config, world: int) -> JobFacts:
    """Facts of a launch on hosts like this one, before its ranks start.

    Args:
        cfg: valid configuration.
        world: ranks, of which as many are on a host as it has GPUs; on a CPU all.

    Raises:
        ValueError: LOCAL_WORLD_SIZE is larger than the number of GPUs.
    """
    device = device_here(int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1)
    found, each = _device(cfg, device), world
    if device.type == "cuda":
        each = torch.cuda.device_count()
    hosts = [f"host {rank // each}" for rank in range(world)]
    one = _rank(0, hosts[0], hosts[0], found, device)
    ranks = (replace(one, rank=i, host=name, node=name) for i, name in enumerate(hosts))
    return JobFacts(tuple(ranks))


def gather_facts(cfg: Config, runtime: Runtime) -> JobFacts:
    """Facts of all ranks. Collective."""
    same: dict[Device, Device] = {}  # equal devices of ranks are one object, as when described
    ranks = (
        replace(r, device=same.setdefault(r.device, r.device))
        for r in gather(facts_here(cfg, runtime))
    )
    return JobFacts(tuple(ranks))


def described(cfg: Config, world: int, machine: Machine | None = None) -> JobFacts:
    """Facts of ranks on Hopper GPUs with all optional packages.

    Args:
        cfg: configuration, for the dtype of its tokens.
        world: ranks.
        machine: GPUs and nodes; those of `run.machine` by default.
    """
    machine = machine or MACHINES[cfg.run.machine]
    return _described(compute_dtype(cfg), world, machine)


@functools.lru_cache(maxsize=64)
def _described(dtype: torch.dtype, world: int, machine: Machine) -> JobFacts:
    device = Device(
        kind="cuda",
        capability=(9, 0),
        machine=machine,
        packages=HOPPER_PACKAGES | {"transformer_engine"},
        compiles=True,
        refusals=tuple((name, refuse_dtype(name, dtype)) for name in TRANSPORTS),
    )
    gpu = FreeMemory("a GPU", machine.room)
    host = FreeMemory("a host", machine.host_room)
    names = [f"node {rank // machine.node_gpus}" for rank in range(world)]
    ranks = tuple(RankFacts(i, name, name, device, gpu, host) for i, name in enumerate(names))
    return JobFacts(ranks, f"on nodes of {machine.node_gpus} GPUs ")
