"""Probabilities that a token goes to an owner of experts, such as a rank or a node.

Exact over uniformly random routing: a token's groups are drawn first if `router.group_topk` limits
them (arXiv 2412.19437, section 2.1.2), then its experts among theirs. Experts, groups and owners
are in one order, so that a group that is as large as a node is the experts of a node.
"""

import functools
import itertools
from collections.abc import Sequence
from math import comb
from typing import NamedTuple


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
    """Experts of `first` to `first + size` in each group that has any of them, sorted."""
    width = sampling.experts // sampling.groups
    end, groups = first + size, range(first // width, -(-(first + size) // width))
    return tuple(sorted(min(end, (g + 1) * width) - max(first, g * width) for g in groups))


def _missed(sampling: TopKSampling, parts: Sequence[int]) -> float:
    """Probability that a token has none of an owner's experts, `parts[i]` in its i-th group."""
    width = sampling.experts // sampling.groups
    ways = {(0, 0): 1}
    """Ways to choose among the owner's groups, by (groups chosen, experts of the owner in them)."""
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
