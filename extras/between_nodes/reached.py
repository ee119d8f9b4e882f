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


class Draw(NamedTuple):
    """Parameters of the random choice of a token's experts."""

    experts: int
    top_k: int
    groups: int = 1
    group_topk: int = 1


def reached(draw: Draw, sizes: Sequence[int]) -> list[float]:
    """Probability that a token has an expert of each owner; owner i holds the next `sizes[i]`."""
    return _probabilities(draw, tuple(sizes))


def most_owners(draw: Draw, sizes: Sequence[int]) -> int:
    """Bound on the number of owners of one token's experts, from the router's limit on groups."""
    firsts = list(itertools.accumulate(sizes, initial=0))
    size = draw.experts // draw.groups
    owners_of_groups = sorted(
        sum(first < (g + 1) * size and end > g * size for first, end in itertools.pairwise(firsts))
        for g in range(draw.groups)
    )
    return min(len(sizes), draw.top_k, sum(owners_of_groups[-draw.group_topk :]))


@functools.cache
def _probabilities(draw: Draw, sizes: tuple[int, ...]) -> list[float]:
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    known: dict[tuple[int, ...], float] = {}
    probabilities = []
    for first, size in zip(firsts, sizes, strict=True):
        parts = _parts(draw, first, size)
        if parts not in known:
            known[parts] = 1 - _missed(draw, parts)
        probabilities.append(known[parts])
    return probabilities


def _parts(draw: Draw, first: int, size: int) -> tuple[int, ...]:
    """Experts of `first` to `first + size` in each group that has any of them, sorted."""
    width = draw.experts // draw.groups
    end, groups = first + size, range(first // width, -(-(first + size) // width))
    return tuple(sorted(min(end, (g + 1) * width) - max(first, g * width) for g in groups))


def _missed(draw: Draw, parts: Sequence[int]) -> float:
    """Probability that a token has none of an owner's experts, `parts[i]` in its i-th group."""
    width = draw.experts // draw.groups
    ways = {(0, 0): 1}
    """Ways to choose among the owner's groups, by (groups chosen, experts of the owner in them)."""
    for part in parts:
        more: dict[tuple[int, int], int] = {}
        for (chosen, held), n in ways.items():
            for key in ((chosen, held), (chosen + 1, held + part)):
                more[key] = more.get(key, 0) + n
        ways = more
    pool, others = draw.group_topk * width, draw.groups - len(parts)
    missed = sum(
        n * comb(others, draw.group_topk - chosen) * comb(pool - held, draw.top_k)
        for (chosen, held), n in ways.items()
        if chosen <= draw.group_topk
    )
    return missed / (comb(draw.groups, draw.group_topk) * comb(pool, draw.top_k))
