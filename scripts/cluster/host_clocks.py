"""Clocks of hosts against that of rank 0's, by messages through the store of the job."""

import time
from collections.abc import Callable, Mapping

import torch.distributed as dist

from phalanx.scripts.cluster.results import Skew

_TRIPS = 8


def compare(
    store: dist.Store,
    rank: int,
    leaders: Mapping[str, int],
    clock: Callable[[], float] = time.time,
) -> Skew | None:
    """Skew of this rank's host, or None unless it is the first rank (`leaders`) of another.

    Rank 0 answers each host in turn with its time. The best of some round trips counts: the answer
    was made at its middle, give or take half of it. Collective over these ranks.
    """
    others = {host: leader for host, leader in leaders.items() if leader}
    if rank == 0:
        for leader in others.values():
            for trip in range(_TRIPS):
                store.get(f"ping/{leader}/{trip}")
                store.set(f"pong/{leader}/{trip}", repr(clock()))
        return None
    host = next((host for host, leader in others.items() if leader == rank), None)
    if host is None:
        return None
    trips = []
    for trip in range(_TRIPS):
        begin = clock()
        store.set(f"ping/{rank}/{trip}", "")
        answer = float(store.get(f"pong/{rank}/{trip}"))
        end = clock()
        trips.append(((end - begin) / 2, (begin + end) / 2 - answer))
    uncertainty, ahead = min(trips[1:])  # in the first rank 0 may still serve another host
    return Skew(host, ahead, uncertainty)
