"""Facts of jobs for tests, and plans from them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.kernels.limits import Refusal
from phalanx.moe.model.kernel_facts import HOPPER_PACKAGES
from phalanx.moe.plan.facts import Device, FreeMemory, JobFacts, RankFacts
from phalanx.moe.plan.plan import Plan
from phalanx.moe.plan.resolve import resolve

GPU = Device(
    kind="cuda",
    capability=(9, 0),
    machine=MACHINES["h200"],
    packages=HOPPER_PACKAGES | {"transformer_engine"},
    compiles=True,
    refusals=tuple((name, None) for name in TRANSPORTS),
)
"""A Hopper GPU with all optional packages."""
BARE = replace(GPU, packages=frozenset({"triton"}))
"""A Hopper GPU with torch alone."""
CPU = Device(
    kind="cpu",
    capability=None,
    machine=MACHINES["h200"],
    packages=frozenset(),
    compiles=True,
    refusals=(("symm", "needs CUDA"), ("hier", None), ("alltoall", None)),
)


def without(device: Device, **refusals: Refusal) -> Device:
    """A device that cannot serve in some transports."""
    known: Mapping[str, Refusal] = dict(device.refusals) | refusals
    return replace(device, refusals=tuple(known.items()))


def job(
    *devices: Device, free: Sequence[int] = (2**40,), node_ranks: int = 8, ranks: int = 0
) -> JobFacts:
    """Facts of ranks with these devices and bytes of free memory, repeated up to `ranks`.

    Args:
        devices: devices of the first ranks; a GPU with everything by default.
        free: bytes of their GPUs, or of their hosts.
        node_ranks: ranks of a node.
        ranks: number of ranks; by default that of devices or of `free`, whichever is larger.
    """
    devices = devices or (GPU,)
    found = []
    for i in range(ranks or max(len(devices), len(free))):
        device, room = devices[i % len(devices)], free[i % len(free)]
        node = f"host {i // node_ranks}"
        memory = FreeMemory("GPU 0" if device.kind == "cuda" else "this host", room)
        found.append(RankFacts(i, node, node, device, memory, FreeMemory("this host", 2**41)))
    return JobFacts(tuple(found))


def planned(*overrides: str, facts: JobFacts | None = None) -> Plan:
    """The plan of a configuration on two GPUs with everything, or on a job."""
    return resolve(load(list(overrides)), facts or job(ranks=2))


def known(*overrides: str, facts: JobFacts | None = None) -> Config:
    """The configuration without `auto`."""
    return planned(*overrides, facts=facts).cfg


def line(plan: Plan, op: str) -> str:
    """`backend; reason` of an operation on the start page; empty if there is no line."""
    return "".join(f"{c.backend}; {c.reason}" for c in plan.lines() if c.op == op)
