"""Results of a cluster against what its machines are known to reach, and ranks against each other.

Where `configs.tables.machines` has no expectations, GPUs are compared with the median of all.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high

from phalanx.configs.tables.machines import MACHINES
from phalanx.parallel.fault.same_settings import differences, settings_of
from phalanx.scripts.cluster.machine_file import measured_kind
from phalanx.scripts.cluster.results import Cluster, Rank

ENOUGH = 0.75
"""Part of an expected rate that a link has to reach: expectations are of long runs and of eight
GPUs, and collectives of other libraries and shapes differ by this much."""
ENOUGH_TFLOPS = 0.85  # part of an expected speed that matrix products have to reach
SLOW = {"gpu": 0.92, "cpu": 0.2}
"""Part of the median speed below which a rank is slow: clocks of GPUs differ by a few percent,
processes that share cores by more."""
MOST_SKEW = 0.5
"""Seconds by which clocks of hosts may differ: times in logs and in locks on a shared disk."""


@dataclass(frozen=True)
class Expected:
    """Rates that a link or a GPU should reach; None where nothing is known."""

    machine: str = ""
    tflops: float | None = None
    node_gbs: float | None = None
    network_gbs: float | None = None
    all_reduce_gbs: float | None = None


def expected_of(cluster: Cluster, network_gbs: float | None = None) -> Expected:
    """Expectations for the GPUs of a cluster; `network_gbs` in place of the table's."""
    machine = MACHINES.get(measured_kind(cluster.ranks[0].gpu.name))
    hosts = {rank.host for rank in cluster.ranks}
    if machine is None:
        return Expected(network_gbs=network_gbs if len(hosts) > 1 else None)
    network = network_gbs or machine.network_gbs
    # A ring enters and leaves a host once for each network card; each GPU has one.
    local = len(cluster.ranks) // len(hosts)
    ring = machine.node_gbs if len(hosts) == 1 else min(machine.node_gbs, local * network)
    return Expected(
        machine.name,
        machine.dense_tflops,
        machine.node_gbs,
        network if len(hosts) > 1 else None,  # pretended nodes have no network
        ring,
    )


def findings(cluster: Cluster, expected: Expected) -> list[str]:
    """Lines on what is below expectation, each with ranks and hosts by name; empty if fine."""
    checks = (_differences, _driver, _speeds, _memory, _links, _clocks)
    return [line for check in checks for line in check(cluster, expected)]


def _differences(cluster: Cluster, expected: Expected) -> Iterator[str]:
    """Hosts with other GPUs, drivers or libraries than the rest."""
    everyone = []
    for rank in cluster.ranks:
        values = {"GPU": rank.gpu.name, "driver": rank.gpu.driver, **rank.versions}
        settings = settings_of(values, values)
        everyone.append(type(settings)(rank.host, settings.marks, settings.shown))
    yield from (f"hosts differ: {difference}" for difference in differences(everyone))


def _driver(cluster: Cluster, expected: Expected) -> Iterator[str]:
    """GPUs that are held back, or whose driver does not answer."""
    for rank in cluster.ranks:
        if rank.gpu.visible and not rank.gpu.driver:
            yield f"{_named(rank)}: nvidia-smi does not answer"
        if rank.gpu.slowed_by:
            yield f"{_named(rank)}: clocks are held back by {', '.join(rank.gpu.slowed_by)}"


def _speeds(cluster: Cluster, expected: Expected) -> Iterator[str]:
    usual = median_high(rank.tflops for rank in cluster.ranks)
    for rank in cluster.ranks:
        if rank.tflops < SLOW["gpu" if rank.gpu.visible else "cpu"] * usual:
            yield (
                f"{_named(rank)} is slow: {rate(rank.tflops)} TFLOP/s, where the median is "
                f"{rate(usual)}"
            )
    if expected.tflops and usual < ENOUGH_TFLOPS * expected.tflops:
        yield (
            f"all GPUs are slow: matrix products reach {rate(usual)} TFLOP/s, expected "
            f"{rate(expected.tflops)} of an {expected.machine}"
        )


def _memory(cluster: Cluster, expected: Expected) -> Iterator[str]:
    for rank in cluster.ranks:
        gpu = rank.gpu
        if gpu.peers < gpu.visible - 1:
            yield f"{_named(rank)}: reaches {gpu.peers} of {gpu.visible - 1} GPUs of its host"
        if rank.symmetric_memory not in ("", "yes"):
            yield f"{_named(rank)}: no symmetric memory: {rank.symmetric_memory}"


def _links(cluster: Cluster, expected: Expected) -> Iterator[str]:
    """Nodes, pairs of nodes and the whole, whose bandwidth is too low."""
    gpus = all(rank.gpu.visible for rank in cluster.ranks)
    usual = _usual([r.node_gbs for r in cluster.ranks if r.node_gbs], expected.node_gbs, gpus)
    for rank in cluster.ranks:
        if rank.node_gbs and rank.node_gbs < ENOUGH * usual:
            yield f"{_named(rank)}: {rate(rank.node_gbs)} GB/s inside its node, {_beside(usual)}"
    usual = _usual([rail.gbs for rail in cluster.rails], expected.network_gbs, gpus)
    for rail in cluster.rails:
        if rail.gbs < ENOUGH * usual:
            yield (
                f"{rail.nodes[0]} and {rail.nodes[1]}: {rate(rail.gbs)} GB/s between ranks "
                f"{rail.ranks[0]} and {rail.ranks[1]}, {_beside(usual)}"
            )
    wanted, reached = expected.all_reduce_gbs, cluster.all_reduce_gbs
    if wanted and reached and reached < ENOUGH * wanted:
        yield f"all-reduce of all ranks: {rate(reached)} GB/s, {_beside(wanted)}"


def _clocks(cluster: Cluster, expected: Expected) -> Iterator[str]:
    for skew in cluster.skews:
        if abs(skew.seconds) > MOST_SKEW + skew.uncertainty:
            yield (
                f"{skew.host}: its clock is {abs(skew.seconds):.1f} s "
                f"{'ahead of' if skew.seconds > 0 else 'behind'} that of {cluster.ranks[0].host}"
            )


def _usual(measured: Sequence[float], expected: float | None, gpus: bool) -> float:
    """Rate to compare with: the expected one, or the median of GPUs; of CPUs there is none."""
    if expected is not None:
        return expected
    return median_high(measured) if gpus and measured else -math.inf


def _beside(usual: float) -> str:
    return f"expected {rate(usual)}"


def _named(rank: Rank) -> str:
    return f"rank {rank.rank} ({rank.host})"


def rate(value: float) -> str:
    """A rate with three digits at least: `334`, `39.5`, `0.0213`."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
