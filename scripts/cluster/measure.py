"""The check of a rank, stage by stage; a stage that some rank does not end names that rank."""

import datetime
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

import phalanx
from phalanx.parallel.dispatcher.nodes import names_here
from phalanx.parallel.fault.activity import set_activity
from phalanx.parallel.fault.agreement import gather
from phalanx.scripts.cluster import gpu, host_clocks, links
from phalanx.scripts.cluster.results import Cluster, Rail, Rank

SLOW_SECONDS = 0.05  # time that a round of a rank takes longer which is slow on purpose
_LATER = 10  # seconds by which NCCL's own limit comes after the watchdog's, which names a rank


@dataclass(frozen=True)
class Place:
    """This rank, of how many, and its device."""

    rank: int
    world: int
    device: torch.device


def measure(place: Place, store: dist.Store, timeout: float, fault: str = "") -> Cluster:
    """Results of all ranks, the same on each of them. Collective.

    Args:
        place: this rank; its device is the current one.
        timeout: seconds of a stage; the watchdog ends the job after it.
        fault: `slow` or `hang`, to rehearse either on this rank.
    """
    host, node = names_here(place.rank)
    if fault == "hang":
        _stage("rehearsal of a hang")
        time.sleep(1e6)
    _stage("speed of the device")
    call, flops = gpu.product(place.device)
    described = gpu.describe(place.device, call)
    tflops = gpu.tflops(place.device, call, flops, SLOW_SECONDS if fault == "slow" else 0.0)
    launch_us = gpu.launch_us(place.device)
    _stage("process group")
    cuda = place.device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=place.rank,
        world_size=place.world,
        timeout=datetime.timedelta(seconds=timeout + _LATER),
    )
    links.align(place.device)
    names = gather((host, node))
    nodes = links.members([name for _, name in names])
    reached = None
    if place.world > 1:
        _stage("all-reduce of all ranks")
        reached = links.all_reduce(place.device, place.world)
    _stage("bandwidth inside the node")
    group = dist.new_group(nodes[node], use_local_synchronization=True)
    alone = len(nodes[node]) == 1
    node_gbs = None if alone else links.inside(place.device, group)
    _stage("symmetric memory of the node")
    symmetric = ""
    if cuda and not alone:
        peers = min(gather((described.peers, described.visible)), key=lambda p: p[0] - p[1])
        together = peers[0] == peers[1] - 1
        symmetric = (
            links.symmetric_memory(place.device, group)
            if together
            else "GPUs of a host cannot write to each other's memory"
        )
    _stage("bandwidth between nodes")
    rails, latency_us = dict[tuple[int, int], float](), None
    if len(nodes) > 1:
        rails = links.rails(place.device, place.rank, nodes)
        small = links.rails(place.device, place.rank, nodes, elements=1)
        latency_us = max((4 / gbs / 1e3 for gbs in small.values()), default=None)
    _stage("clocks of hosts")
    leaders = {host: ranks[0] for host, ranks in links.members([h for h, _ in names]).items()}
    skew = host_clocks.compare(store, place.rank, leaders)
    _stage("results")
    versions = {"torch": torch.__version__, "phalanx": phalanx.__version__}
    if cuda:
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    rates = {"node_gbs": node_gbs, "launch_us": launch_us, "latency_us": latency_us}
    mine = Rank(
        place.rank, host, node, described, versions, tflops, symmetric_memory=symmetric, **rates
    )
    everyone = gather((mine, reached, rails, skew))
    return Cluster(
        ranks=[rank for rank, _, _, _ in everyone],
        all_reduce_gbs=min((gbs for _, gbs, _, _ in everyone if gbs is not None), default=None),
        rails=_slowest(nodes, [found for _, _, found, _ in everyone]),
        skews=[skew for _, _, _, skew in everyone if skew is not None],
    )


def end_groups() -> None:
    """End the process groups of `measure`. NCCL may wait for the other ranks, as in a stage."""
    _stage("end of the process groups")
    dist.destroy_process_group()


def _stage(name: str) -> None:
    set_activity(name, limited=True)


def _slowest(
    nodes: dict[str, list[int]], everyone: list[dict[tuple[int, int], float]]
) -> list[Rail]:
    node_of = {rank: node for node, ranks in nodes.items() for rank in ranks}
    worst: dict[tuple[str, str], Rail] = {}
    for found in everyone:
        for (a, b), gbs in found.items():
            pair = node_of[a], node_of[b]
            if pair not in worst or gbs < worst[pair].gbs:
                worst[pair] = Rail(pair, gbs, (a, b))
    return list(worst.values())
