"""Which ranks of a group share a node, and process groups inside and across nodes.

A node is a host. For tests on one host, PHALANX_NODE_GPUS=2 pretends nodes of two consecutive ranks
of the job each.
"""

import functools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


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


def nodes_of(group: dist.ProcessGroup) -> Nodes:
    """The nodes of a group. All ranks of the job ask together, each for its own group, or asked
    `reason_against` before.

    Raises:
        ValueError: it has none as described by `Nodes`.
    """
    found = _found(group)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def reason_against(group: dist.ProcessGroup | None) -> str:
    """Why a group does not span several nodes evenly; empty if it does.

    All ranks of the job ask together for the first time, each for its own group.
    """
    if group is None or group.size() == 1:
        return "there is one rank"
    found = _found(group)
    return found if isinstance(found, str) else ""


def uneven(names: Sequence[str]) -> str:
    """Why nodes of these names, by rank, cannot be `Nodes`; empty if they can."""
    order = list(dict.fromkeys(names))
    sizes = [names.count(name) for name in order]
    if len(order) == 1:
        return "all ranks are on one node"
    if len(set(sizes)) > 1:
        return f"the nodes hold {', '.join(map(str, sizes))} ranks, not the same number"
    if sizes[0] == 1:
        return "every node holds one rank"
    if any(name != order[i // sizes[0]] for i, name in enumerate(names)):
        return "the ranks of a node do not follow one another"
    return ""


@functools.cache
def _found(group: dist.ProcessGroup) -> Nodes | str:
    """The nodes, or why there are none.

    Every rank takes part in making the groups of all ranks: a communicator of NCCL is split off
    that of the whole job, which takes all.
    """
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (_name(), tuple(dist.get_process_group_ranks(group))))
    mine: Nodes | str = ""
    for ranks in sorted({ranks for _, ranks in told}):
        names = [told[rank][0] for rank in ranks]
        against = uneven(names)
        made = against or _made(ranks, len(set(names)))
        if dist.get_rank() in ranks:
            mine = made
    return mine


def _made(ranks: Sequence[int], count: int) -> Nodes | str:
    """Groups of `ranks` on `count` nodes, for a rank that is one of them."""
    size, timeout = len(ranks) // count, time_limit()
    split = [list(ranks[i * size : (i + 1) * size]) for i in range(count)]
    inside = [dist.new_group(node, timeout=timeout) for node in split]
    rails = [dist.new_group(list(rail), timeout=timeout) for rail in zip(*split, strict=True)]
    if dist.get_rank() not in ranks:
        return ""
    index, place = divmod(list(ranks).index(dist.get_rank()), size)
    return Nodes(count, size, index, inside[index], rails[place])


def time_limit() -> timedelta:
    """Of the world's collectives (parallel.runtime), which comes after the watchdog's."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    limit: timedelta = dist.group.WORLD._get_backend(device).options._timeout
    return limit


def _name() -> str:
    """Of this rank's node."""
    given = os.environ.get("PHALANX_NODE_GPUS", "")
    if not given:
        return socket.gethostname()
    if not given.isdecimal() or not int(given):
        raise ValueError(f"PHALANX_NODE_GPUS={given} must be a number of GPUs, or not set")
    return str(dist.get_rank() // int(given))
