"""Rows of the hidden size that a transport sends and holds: estimates without ranks or GPUs.

Every transport states its costs (`parallel.dispatcher.transport_class.Dispatcher.costs`) for one
MoE layer, one micro-batch and one rank; `moe.plan.cost` turns rows into bytes and seconds.

Probabilities that a token goes to a rank or node (`owner_probabilities`) are exact over uniformly
random routing: a token's groups are drawn first if `router.group_topk` limits them (arXiv
2412.19437, section 2.1.2), then its experts among theirs. Experts, groups and owners are in one
order, so that a group that is as large as a node is the experts of a node.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple


@dataclass(frozen=True)
class Links:
    """Rows or bytes of a token that leave GPUs, on average over the GPUs that pass it on."""

    near: float  # rows or bytes over the links inside a node
    far: float  # rows or bytes over the network, to GPUs of other nodes

    def __add__(self, other: "Links") -> "Links":
        return Links(self.near + other.near, self.far + other.far)

    def __rmul__(self, factor: float) -> "Links":
        return Links(factor * self.near, factor * self.far)

    @property
    def total(self) -> float:
        return self.near + self.far


NOTHING = Links(0.0, 0.0)


@dataclass(frozen=True)
class GroupTopology:
    """An expert-parallel group, and the ranks and nodes that an average token goes to."""

    ranks: int
    nodes: int  # number of nodes that its ranks, which are neighbours, span
    tokens: int  # number of tokens of a rank
    wanted_ranks: float  # ranks with one of the token's experts, its own included
    other_nodes: float  # number of nodes, without the token's own, that hold one of its experts
    block: int  # number of rows in a block of a rank's tokens for one node, which is static
    pushes: bool  # true if ranks of a node can write to each other's memory
    keep: bool  # received tokens are saved for backward, not resent (`parallel.save_x`)

    rows_back: int = 1  # rows of a token that a rank sends back: 1, their sum, or one per expert id

    @property
    def node_ranks(self) -> float:
        return self.ranks / self.nodes

    @property
    def received(self) -> int:
        return self.ranks * self.tokens

    @property
    def received_blocks(self) -> int:
        return self.ranks * self.block

    @property
    def once_a_rank(self) -> Links:
        """A row from the token's rank directly to each rank with one of its experts."""
        hit, ranks = self.wanted_ranks, self.ranks
        return Links(hit * (self.node_ranks - 1) / ranks, hit * (1 - 1 / self.nodes))

    @property
    def once_a_node(self) -> Links:
        """A row to one GPU of each node with one of its experts, and from there to the ranks."""
        size = self.node_ranks
        return Links(self.wanted_ranks * (size - 1) / size, self.other_nodes)


@dataclass(frozen=True)
class TransportCosts:
    """Costs of a transport for a `GroupTopology`."""

    there: Links = NOTHING  # rows of a token on the way to its experts; gradients likewise
    back: Links = NOTHING  # rows of a token on the way back
    resent: Links = NOTHING  # rows of a token that are resent in the backward pass
    saved: int = 0  # rows that a rank saves for the backward pass
    backward: int = 0  # rows that its backward pass holds beyond the saved ones
    buffers: int = 0  # rows of receive buffers outside torch's allocator, for all layers
    exposed: float = 1.0  # part of the time inside a node with reserved SMs; 1: no overlap
    pipelined: bool = False  # rows are forwarded as they arrive: the slower link counts alone


class TopKSampling(NamedTuple):
    """Parameters of the random choice of a token's experts."""

    experts: int
    top_k: int
    groups: int = 1
    group_topk: int = 1


def owner_probabilities(sampling: TopKSampling, sizes: Sequence[int]) -> list[float]:
    """Probability that a token has an expert of each owner; owner i holds the next `sizes[i]`."""
    return _probabilities(sampling, tuple(sizes))


def most_owners(sampling: TopKSampling, sizes: Sequence[int]) -> int:
    """Bound on the number of owners of one token's experts, from the router's limit on groups."""
    firsts = list(itertools.accumulate(sizes, initial=0))
    size = sampling.experts // sampling.groups
    owners_of_groups = sorted(
        sum(first < (g + 1) * size and end > g * size for first, end in itertools.pairwise(firsts))
        for g in range(sampling.groups)
    )
    return min(len(sizes), sampling.top_k, sum(owners_of_groups[-sampling.group_topk :]))


@functools.cache
def _probabilities(sampling: TopKSampling, sizes: tuple[int, ...]) -> list[float]:
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    known: dict[tuple[int, ...], float] = {}
    probabilities = []
    for first, size in zip(firsts, sizes, strict=True):
        parts = _parts(sampling, first, size)
        if parts not in known:
            known[parts] = 1 - _missed(sampling, parts)
        probabilities.append(known[parts])
    return probabilities


def _parts(sampling: TopKSampling, first: int, size: int) -> tuple[int, ...]:
    width = sampling.experts // sampling.groups
    end, groups = first + size, range(first // width, -(-(first + size) // width))
    return tuple(sorted(min(end, (g + 1) * width) - max(first, g * width) for g in groups))


def _missed(sampling: TopKSampling, parts: Sequence[int]) -> float:
    """Probability that a token has none of an owner's experts, `parts[i]` in its i-th group."""
    width = sampling.experts // sampling.groups
    ways = {(0, 0): 1}  # by (groups chosen, experts of the owner in them)
    for part in parts:
        more: dict[tuple[int, int], int] = {}
        for (chosen, held), n in ways.items():
            for key in ((chosen, held), (chosen + 1, held + part)):
                more[key] = more.get(key, 0) + n
        ways = more
    pool, others = sampling.group_topk * width, sampling.groups - len(parts)
    missed = sum(
        n * comb(others, sampling.group_topk - chosen) * comb(pool - held, sampling.top_k)
        for (chosen, held), n in ways.items()
        if chosen <= sampling.group_topk
    )
    return missed / (comb(sampling.groups, sampling.group_topk) * comb(pool, sampling.top_k))
