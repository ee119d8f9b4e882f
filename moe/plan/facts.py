"""Facts of the ranks of a job that its plan depends on: measured once, or described.

Free memory of a host or a GPU is one, cgroups included. `gather_facts` is the only exchange between
ranks before a plan.
"""

import functools
import os
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
import torch

from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import (
    CPU_RANKS,
    MACHINES,
    Machine,
    Rates,
    machine_named,
    machine_of,
)
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.kernels import registry
from phalanx.kernels.limits import Refusal
from phalanx.moe.model.kernel_facts import HOPPER_PACKAGES, compute_dtype
from phalanx.parallel.dispatcher import nodes
from phalanx.parallel.dispatcher.transport import refusals_here, refuse_dtype
from phalanx.parallel.fault.agreement import gather

if TYPE_CHECKING:  # which imports Megatron-Core, seconds that a dry run does without
    from phalanx.parallel.runtime import Runtime


@dataclass(frozen=True)
class FreeMemory:
    """Memory that ranks on one device can still allocate together."""

    device: str  # `this host`, `GPU 0`
    free: int  # free bytes
    swap: int = 0  # free bytes of swap space, which are slow


def free_host_memory(
    root: Path = Path("/sys/fs/cgroup"), me: Path = Path("/proc/self/cgroup")
) -> FreeMemory:
    """Free memory of this host, or less if a cgroup of this process allows less.

    `root` is the mount point of the cgroups, `me` the file with those of this process.
    """
    free, swap = psutil.virtual_memory().available, psutil.swap_memory().free
    device = "this host"
    for folder in _cgroups(root, me):
        if (left := _left(folder)) is not None and left < free:
            free, device = max(0, left), "this host's cgroup"
    return FreeMemory(device, free, swap)


def free_gpu_memory(device: torch.device) -> FreeMemory:
    """Free memory of a GPU, unused memory that torch's allocator has reserved included."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return FreeMemory(f"GPU {device.index or 0}", free + unused)


def _cgroups(root: Path, me: Path) -> list[Path]:
    """Folders of the memory cgroups of this process, starting at the mount point."""
    try:
        lines = me.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top = root / "memory" if kinds else root
        parts = Path(path.lstrip("/"))
        folders += [top, *(top / p for p in reversed(parts.parents)), top / parts]
    return list(dict.fromkeys(folders))


def _left(folder: Path) -> int | None:
    """Bytes that a cgroup may still allocate, reclaimable page cache included; None: no limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            most = (folder / limit).read_text(encoding="utf-8").strip()
            used = int((folder / usage).read_text(encoding="utf-8"))
            stat = (folder / "memory.stat").read_text(encoding="utf-8")
        except OSError:
            continue
        if not most.isdecimal():  # max
            return None
        counters = dict(line.split(" ", 1) for line in stat.splitlines())
        return int(most) - used + int(counters.get(cache, 0))
    return None


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
    _kept: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

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

    @functools.cached_property
    def nodes(self) -> tuple[str, ...]:
        """Name of the node of each rank."""
        return tuple(r.node for r in self.ranks)

    def groups(self, size: int) -> tuple[list[int], list[tuple[RankFacts, ...]]]:
        """For each group of `size` consecutive ranks its kind; and the first group of each kind.

        Groups are of one kind if their ranks have the same devices, on nodes in the same order.
        """
        return self.kept(size, lambda: self._groups(size))

    def _groups(self, size: int) -> tuple[list[int], list[tuple[RankFacts, ...]]]:
        kinds = dict[tuple[object, ...], int]()
        found, firsts = list[int](), list[tuple[RankFacts, ...]]()
        for start in range(0, self.world, size):
            members = self.ranks[start : start + size]
            order = {node: i for i, node in enumerate(dict.fromkeys(r.node for r in members))}
            alike = tuple((order[r.node], id(r.device)) for r in members)
            if alike not in kinds:
                kinds[alike] = len(kinds)
                firsts.append(members)
            found.append(kinds[alike])
        return found, firsts

    def kept[T](self, key: Hashable, make: Callable[[], T]) -> T:
        """A result that depends on these facts and the key alone, made once."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(T, self._kept[key])

    def on_host(self, rank: int) -> list[int]:
        """Ranks of a rank's host, itself included."""
        return [r.rank for r in self.ranks if r.host == self.ranks[rank].host]


def facts_here(cfg: Config, runtime: "Runtime") -> RankFacts:
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
        machine=machine_named(machine_of(name, cfg.run.machine)),
        packages=registry.installed(),
        compiles=registry.compiles(),
        refusals=tuple(refusals_here(cfg.parallel.dispatch, compute_dtype(cfg)).items()),
    )


def _rank(rank: int, host: str, node: str, found: Device, device: torch.device) -> RankFacts:
    of_host = free_host_memory()
    memory = free_gpu_memory(device) if device.type == "cuda" else of_host
    return RankFacts(rank, host, node, found, memory, of_host)


def expected(cfg: Config, world: int) -> JobFacts:
    """Facts of a launch on hosts like this one, before its ranks start, for `--check`.

    A host has as many ranks as GPUs; on a CPU all. Raises ValueError if LOCAL_WORLD_SIZE is larger
    than the number of GPUs.
    """
    from phalanx.parallel.runtime import device_here

    device = device_here(int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1)
    found, each = _device(cfg, device), world
    if device.type == "cuda":
        each = torch.cuda.device_count()
    hosts = [f"host {rank // each}" for rank in range(world)]
    one = _rank(0, hosts[0], hosts[0], found, device)
    ranks = (replace(one, rank=i, host=name, node=name) for i, name in enumerate(hosts))
    return JobFacts(tuple(ranks))


def gather_facts(cfg: Config, runtime: "Runtime") -> JobFacts:
    """Facts of all ranks. Collective."""
    same: dict[Device, Device] = {}  # equal devices of ranks are one object, as when described
    ranks = (
        replace(r, device=same.setdefault(r.device, r.device))
        for r in gather(facts_here(cfg, runtime))
    )
    return JobFacts(tuple(ranks))


def described(cfg: Config, world: int, machine: Machine | None = None) -> JobFacts:
    """Facts of ranks on Hopper GPUs, which need not exist, with all optional packages.

    GPUs and nodes are those of `run.machine` by default.
    """
    machine = machine or machine_named(cfg.run.machine)
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
