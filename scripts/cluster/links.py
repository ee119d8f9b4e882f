"""Bandwidth inside nodes, between pairs of nodes, and of all ranks together.

Rates are in units of 1e9 bytes a second, a rank and direction.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from phalanx.scripts.cluster.gpu import shortest

_MIB = 2**20
_ALL_REDUCE = {"cuda": 512 * _MIB, "cpu": 4 * _MIB}
_NODE = {"cuda": 256 * _MIB, "cpu": 4 * _MIB}
_RAIL = {"cuda": 64 * _MIB, "cpu": _MIB}
_ROUNDS = 5
_MOST_PARTNERS = 15
"""Nodes that a node is paired with: all of 16, and some of more, so that it takes seconds."""


def members(nodes: Sequence[str]) -> dict[str, list[int]]:
    """Ranks of each node, by the names of the nodes of all ranks."""
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        found.setdefault(node, []).append(rank)
    return found


def align(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Wait for all ranks of a group, or of the job, and for what they have given their devices."""
    one = torch.ones(1, device=device)
    dist.all_reduce(one, group=group)
    one.item()


def all_reduce(device: torch.device, world: int) -> float:
    """Bus bandwidth of an all-reduce over all ranks: what each link of a ring would carry."""
    size = _ALL_REDUCE[device.type]
    values = torch.zeros(size // 4, device=device)
    seconds = shortest(device, lambda: dist.all_reduce(values), _ROUNDS)
    return 2 * (world - 1) / world * size / seconds / 1e9


def inside(device: torch.device, group: dist.ProcessGroup) -> float:
    """Rate at which a rank sends to the others of its node, all of them at once."""
    ranks, size = group.size(), _NODE[device.type]
    rows = size // 4 // ranks * ranks
    sent, received = (torch.zeros(rows, device=device) for _ in range(2))
    call = lambda: dist.all_to_all_single(received, sent, group=group)  # noqa: E731
    return 4 * rows * (ranks - 1) / ranks / shortest(device, call, _ROUNDS) / 1e9


def symmetric_memory(device: torch.device, group: dist.ProcessGroup) -> str:
    """`yes` if the left neighbour of a rank can write its memory, or else the reason."""
    from phalanx.parallel.dispatcher.exchange import PeerMemory

    index, count, size = group.rank(), group.size(), 4096
    peers = PeerMemory(group, size, lambda memory: memory.fill_(count))
    align(device, group)
    right = peers.handle.get_buffer((index + 1) % count, (size,), torch.uint8)
    right.fill_(index)
    align(device, group)
    left = (index - 1) % count
    arrived = bool((peers.memory == left).all())
    return "yes" if arrived else f"what local rank {left} wrote did not arrive"


def pairings(nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds in which every node meets another one, until each has met all, or some of many.

    A tournament: one node stays, the others move on by a place a round. An odd one rests.
    """
    places = [*range(nodes), *([-1] if nodes % 2 else [])]
    rounds = []
    for _ in range(min(len(places) - 1, _MOST_PARTNERS)):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(p), max(p)) for p in pairs if min(p) >= 0])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def rails(
    device: torch.device, rank: int, nodes: dict[str, list[int]], elements: int = 0
) -> dict[tuple[int, int], float]:
    """Rate between this rank and each of its partners, by the ranks of a pair.

    Exchanges have so many `elements` of four bytes, or as many as fill a link. A partner is the
    rank with the same place on another node. Collective over the job.
    """
    size, every, found = elements or _RAIL[device.type] // 4, list(nodes.values()), {}
    sent, received = (torch.zeros(size, device=device) for _ in range(2))
    mine = next(at for at, ranks in enumerate(every) if rank in ranks)
    place = every[mine].index(rank)
    for pairs in pairings(len(every)):
        align(device)
        for pair in pairs:
            other = every[sum(pair) - mine] if mine in pair else []
            if place >= len(other):
                continue  # another pair, or a node with fewer ranks
            partner = other[place]

            def exchange(partner: int = partner) -> None:
                ops = [
                    dist.P2POp(dist.isend, sent, partner),
                    dist.P2POp(dist.irecv, received, partner),
                ]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()

            seconds = shortest(device, exchange, _ROUNDS)
            found[min(rank, partner), max(rank, partner)] = 4 * size / seconds / 1e9
    align(device)
    return found
