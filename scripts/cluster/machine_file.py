"""A file for `run.machine` from what a check measured (extras/clusters)."""

from statistics import median

from phalanx.configs.knobs import pluralize
from phalanx.configs.tables.machines import machine_named, machine_of
from phalanx.scripts.cluster.results import Cluster

_KINDS = ("gb200", "b200", "h800", "h20", "a100")  # besides those that were measured
_OTHER_BOARDS = {"PCIe", "NVL", "MIG"}  # slower than the SXM modules that the kinds are


def measured_kind(device: str) -> str:
    """Kind of the GPU with this CUDA name; empty if none that was measured is like it."""
    return machine_of(device, "") if _words(device) else ""


def _kind_of(device: str) -> str:
    words, named = _words(device), {k: machine_named(k).name.split()[0] for k in _KINDS}
    return measured_kind(device) or next((k for k, name in named.items() if name in words), "")


def _words(device: str) -> set[str]:
    """Words of a CUDA name; none of a board unlike those of the kinds."""
    words = {*device.replace("-", " ").split()}
    return set() if words & _OTHER_BOARDS else words


def machine_file(cluster: Cluster) -> str:
    """The file as YAML, or ValueError: the GPUs are of no kind that is known.

    Rates of links are those of the slowest rank and pair, for which all others wait. Those of
    products are the table's: a check is too short for clocks to come down to those of a run.
    """
    first, hosts = cluster.ranks[0].gpu, {rank.host for rank in cluster.ranks}
    if not (kind := _kind_of(first.name)):
        raise ValueError(f"no kind of GPU is known that is like {first.name!r}")
    values: dict[str, float | None] = {
        "node_gpus": max(sum(rank.host == host for rank in cluster.ranks) for host in hosts),
        "memory_gib": min((g for r in cluster.ranks if (g := r.gpu.memory_gib)), default=None),
        "node_gbs": min((g for r in cluster.ranks if (g := r.node_gbs)), default=None),
        "launch_us": _median([u for r in cluster.ranks if (u := r.launch_us)]),
    }
    if len(hosts) > 1:  # pretended nodes have no network
        values["network_gbs"] = min((rail.gbs for rail in cluster.rails), default=None)
        values["latency_us"] = max((u for r in cluster.ranks if (u := r.latency_us)), default=None)
    machine = machine_named(kind)
    if machine.only_memory:  # of which a file may say nothing else
        values = {name: values[name] for name in ("node_gpus", "memory_gib")}
    known = {name: value for name, value in values.items() if value is not None}
    measured = ", ".join(known)
    for link in ("node", "network"):  # faster links than those of the kind
        rate, line = known.get(f"{link}_gbs", 0.0), f"{link}_line_gbs"
        if rate > getattr(machine, line):
            known[line] = rate
    count = f"{len(cluster.ranks)} x {first.name} on {pluralize(len(hosts), 'host')}"
    lines = [
        f"# Written by check_cluster from {count}; docs/operations.md says what may be added.",
        f"kind: {kind}",
        *(f"{name}: {value:.4g}" for name, value in known.items()),
        f"measured: [{measured}]",
    ]
    return "\n".join(lines) + "\n"


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
