"""Group-limited routing in the kernel `topk`: the groups of experts that a token chooses from.

A group is ranked by the sum of its best one or two scores, and only experts of the best groups keep
their scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). Every lane puts the two best keys of
each of its vectors into shared memory; lane g collects those of group g, and each group counts the
groups better than itself. Ties go to the lower group.

    all lanes   two best keys of each vector to shared memory; a vector is of one group
                -- sync_warp --
    lane g      score of group g, from the pairs of its vectors; its rank among the groups
    all lanes   a ballot of the chosen groups; keys of the others become that of -inf

Legend: E experts in G groups of E / G, a warp a token.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64

from phalanx.kernels.sm90.routing.keys import bits_of, key_of, larger, smaller
from phalanx.kernels.sm90.routing.logits import (
    FOUR,
    LANES,
    MAX_BEST,
    ExpertGroups,
    Logits,
    as_float,
)

MINUS_INFINITY = 0x007FFFFF  # key of -inf, the score of an expert whose group is not chosen
_LOW = 0xFFFFFFFF


@cute.jit
def keep_best_groups(
    groups: ExpertGroups, row: Logits, keys: cute.Tensor, best: cute.Tensor
) -> None:
    """Overwrite the keys of experts in groups that are not chosen by that of -inf.

    Args:
        groups: those of the kernel's configuration.
        row: the token's row, which gives the experts of this lane's keys.
        keys: [4, vectors] in registers, 0 past the last expert; written.
        best: shared memory of the warp, a Uint64 for each vector of each lane; overwritten.
    """
    _store_best(keys, best)
    score = _group_key(groups, best)
    lane, rank = cute.arch.lane_idx(), Int32(0)
    for g in cutlass.range_constexpr(groups.number):
        other = cute.arch.shuffle_sync(score, g)
        # Ranks are distinct, as ties go to the lower group: exactly `chosen` groups are chosen.
        if other > score:
            rank += 1
        if other == score and lane > g:
            rank += 1
    chosen = Uint32(cute.arch.vote_ballot_sync(lane < groups.number and rank < groups.chosen))
    for v in cutlass.range_constexpr(row.config.vectors):
        # Experts that are excluded score -inf; 0 is for places without an expert.
        group = Uint32(row.expert(v)) // Uint32(groups.size)
        if row.expert(v) < row.experts and (chosen >> group) % 2 == 0:
            for i in cutlass.range_constexpr(FOUR):
                keys[i, v] = Uint32(MINUS_INFINITY)


@cute.jit
def _store_best(keys: cute.Tensor, best: cute.Tensor) -> None:
    """Store the two best keys of every vector in shared memory."""
    lane = cute.arch.lane_idx()
    for v in cutlass.range_constexpr(keys.shape[1]):
        first, second = keys[0, v], Uint32(0)
        for i in cutlass.range_constexpr(1, FOUR):
            # Both from the old `first`: what a larger key displaces may be the second best.
            first, second = larger(first, keys[i, v]), larger(second, smaller(first, keys[i, v]))
        best[v * LANES + lane] = (Uint64(first) << 32) + Uint64(second)
    cute.arch.sync_warp()  # before `_group_key` reads other lanes' pairs


@cute.jit
def _group_key(groups: ExpertGroups, best: cute.Tensor) -> Uint32:
    """Key of the score of this lane's group; 0 in lanes without a group."""
    lane, vectors = cute.arch.lane_idx(), groups.size // FOUR
    first, second, key = Uint32(0), Uint32(0), Uint32(0)
    if lane < groups.number:
        for j in cutlass.range_constexpr(vectors):
            # Groups lie a power of two apart for most sizes: starting each lane at another vector
            # of its group spreads the lanes over the banks.
            pair = best[lane * vectors + (lane + j) % vectors]
            high, low = Uint32(pair >> 32), Uint32(pair & Uint64(_LOW))
            second = larger(smaller(first, high), larger(second, low))
            first = larger(first, high)
        # Scores are added as numbers, then compared as keys again.
        key = first
        if cutlass.const_expr(groups.best == MAX_BEST):
            key = key_of(as_float(bits_of(first)) + as_float(bits_of(second)))
    return key
