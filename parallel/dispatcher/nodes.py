"""Nodes of an expert-parallel group, and process groups inside and across nodes.

A node is a host. For tests, PHALANX_NODE_GPUS=2 simulates nodes of two consecutive ranks of the job
each (and PHALANX_WIRE a network between them).
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from phalanx.kernels.limits import Refusal


@dataclass(frozen=True)
class Nodes:
    """The nodes of a group, with the same number of its ranks on each.

    Rank `index * size + p` of the group has the local rank p on node `index`.
    """

    count: int
    size: int  # number of ranks on each node
    index: int  # index of this rank's node
    inside: dist.ProcessGroup  # process group of the ranks of this rank's node
    rail: dist.ProcessGroup  # of the ranks with this local rank, in the order of nodes


def names_here(rank: int) -> tuple[str, str]:
    """Names of this host and of a rank's node on it; ValueError: PHALANX_NODE_GPUS is invalid."""
    host, node_gpus = socket.gethostname(), os.environ.get("PHALANX_NODE_GPUS", "")
    if not node_gpus:
        return host, host
    if not node_gpus.isdecimal() or not int(node_gpus):
        raise ValueError(f"PHALANX_NODE_GPUS={node_gpus} must be a number of GPUs, or not set")
    return host, str(rank // int(node_gpus))


def refuse(names: Sequence[str]) -> Refusal:
    """Reason that the nodes with these names, by rank, cannot be `Nodes`, or None."""
    order = list(dict.fromkeys(names))
    sizes = [names.count(name) for name in order]
    if len(names) == 1:
        return "there is one rank"
    if len(order) == 1:
        return "all ranks are on one node"
    if len(set(sizes)) > 1:
        return f"the nodes hold {', '.join(map(str, sizes))} ranks, not the same number"
    if any(name != order[i // sizes[0]] for i, name in enumerate(names)):
        return "the ranks of a node do not follow one another"
    return None


def join(groups: Mapping[tuple[int, ...], Sequence[str]]) -> Nodes | None:
    """The nodes of this rank's group, with new process groups; None if it is in no group.

    Collective over the job: a communicator of NCCL is split off the one of the whole job. `groups`
    are ranks and names of nodes, for which `refuse` returns None.
    """
    mine = None
    for ranks, names in groups.items():
        nodes = _new_nodes(ranks, len(set(names)))
        mine = nodes or mine
    return mine


def _new_nodes(ranks: Sequence[int], count: int) -> Nodes | None:
    size, timeout = len(ranks) // count, time_limit()
    split = [list(ranks[i * size : (i + 1) * size]) for i in range(count)]
    inside = [dist.new_group(node, timeout=timeout) for node in split]
    rails = [dist.new_group(list(rail), timeout=timeout) for rail in zip(*split, strict=True)]
    if dist.get_rank() not in ranks:
        return None
    index, local_rank = divmod(list(ranks).index(dist.get_rank()), size)
    return Nodes(count, size, index, inside[index], rails[local_rank])


def time_limit() -> timedelta:
    """Timeout of the world's collectives (parallel.runtime), later than the watchdog's."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    world: Any = dist.group.WORLD
    limit: timedelta = world._get_backend(device).options._timeout
    return limit
