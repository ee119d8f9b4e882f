"""Which ranks of a group share a node, and process groups inside and across nodes.

A node is a host. For tests on one host, PHALANX_NODE_GPUS=2 pretends nodes of two consecutive ranks
of the job each.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.kernels.refusal import Refusal


@dataclass(frozen=True)
class Nodes:
    """The nodes of a group, with the same number of its ranks on each.

    Rank `index * size + place` of the group is number `place` of node `index`.
    """

    count: int
    size: int
    """Ranks on each."""
    index: int
    """Of this rank's node."""
    inside: dist.ProcessGroup
    """The ranks of this rank's node."""
    rail: dist.ProcessGroup
    """This rank's place on all nodes, in their order."""


def names_here(rank: int) -> tuple[str, str]:
    """This host, and the node of a rank on it.

    Raises:
        ValueError: PHALANX_NODE_GPUS is no number.
    """
    host, given = socket.gethostname(), os.environ.get("PHALANX_NODE_GPUS", "")
    if not given:
        return host, host
    if not given.isdecimal() or not int(given):
        raise ValueError(f"PHALANX_NODE_GPUS={given} must be a number of GPUs, or not set")
    return host, str(rank // int(given))


def refuse(names: Sequence[str]) -> Refusal:
    """Why nodes of these names, by rank, cannot be `Nodes`."""
    order = list(dict.fromkeys(names))
    sizes = [names.count(name) for name in order]
    if len(names) == 1:
        return "there is one rank"
    if len(order) == 1:
        return "all ranks are on one node"
    if len(set(sizes)) > 1:
        return f"the nodes hold {', '.join(map(str, sizes))} ranks, not the same number"
    if sizes[0] == 1:
        return "every node holds one rank"
    if any(name != order[i // sizes[0]] for i, name in enumerate(names)):
        return "the ranks of a node do not follow one another"
    return None


def join(groups: Mapping[tuple[int, ...], Sequence[str]]) -> Nodes | None:
    """The nodes of this rank's group, with new process groups; None if it is in no group.

    All ranks of the job call it together: a communicator of NCCL is split off that of the whole
    job, which takes all.

    Args:
        groups: ranks of each, and the names of their nodes, which `refuse` does not.
    """
    found = None
    for ranks, names in groups.items():
        made = _made(ranks, len(set(names)))
        found = made or found
    return found


def _made(ranks: Sequence[int], count: int) -> Nodes | None:
    """Groups of `ranks` on `count` nodes, for a rank that is one of them."""
    size, timeout = len(ranks) // count, time_limit()
    split = [list(ranks[i * size : (i + 1) * size]) for i in range(count)]
    inside = [dist.new_group(node, timeout=timeout) for node in split]
    rails = [dist.new_group(list(rail), timeout=timeout) for rail in zip(*split, strict=True)]
    if dist.get_rank() not in ranks:
        return None
    index, place = divmod(list(ranks).index(dist.get_rank()), size)
    return Nodes(count, size, index, inside[index], rails[place])


def time_limit() -> timedelta:
    """Of the world's collectives (parallel.runtime), which comes after the watchdog's."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    limit: timedelta = dist.group.WORLD._get_backend(device).options._timeout
    return limit
