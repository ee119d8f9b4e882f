"""Balancing losses and statistics of a router's logits and choices, in Triton.

Three passes, without atomics and without a host read: `tally` counts choices and sums scores,
`Terms.finish` makes losses and the slope of their sum in the scores, and `slope_to_logits` is the
gradient. Between the first two, counts may be summed over ranks. The formulas are those of
`moe.router.balance`, in fp32; counts are exact below 2^24 tokens.

Legend: T tokens of this rank, B sequences (token t belongs to sequence t % B), E experts, K experts
per token, P programs along positions.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.elementwise.sums_triton import part_sum

_ELEMENTS = 2048  # logits that a program reads at a time
_TURNS = 4  # blocks of positions per program of `router_tally`
TINY = tl.constexpr(1e-20)  # added to the sum that normalises sigmoids


@triton.jit
def sigmoids(x):  # type: ignore[no-untyped-def]
    """Sigmoids; 0 for a padded expert, whose logit is -inf."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def balance_scores(x, SIGMOID: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scores of every row, which sum to 1; 0 for logits of -inf."""
    if SIGMOID:
        s = sigmoids(x)
        return s / (tl.sum(s, 1) + TINY)[:, None]
    s = tl.exp(x - tl.max(x, 1)[:, None])
    return s / tl.sum(s, 1)[:, None]


@triton.jit
def router_tally(  # type: ignore[no-untyped-def]
    logits,
    idx,
    judged,
    parts,
    positions,
    E,
    idx_t,
    judged_t,
    columns,
    K: tl.constexpr,
    SCORED: tl.constexpr,
    SIGMOID: tl.constexpr,
    JUDGED: tl.constexpr,
    LOG_SUM: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    # A program has one sequence, and TURNS blocks of ROWS of its positions. It adds up in registers
    # and writes a row of `parts` that is its own, which `part_sum` adds in order: no atomics.
    b = tl.program_id(1)
    B = tl.num_programs(1)
    e = tl.arange(0, EXPERTS)
    # Each position of a block has sums of its own, which are added behind the loop.
    chosen = tl.zeros([ROWS, EXPERTS], tl.float32)
    best = tl.zeros([ROWS, EXPERTS], tl.float32)
    score = tl.zeros([ROWS, EXPERTS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for turn in range(TURNS):
        s = (tl.program_id(0) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        t = s.to(tl.int64) * B + b
        here = s < positions
        for k in tl.static_range(K):
            expert = tl.load(idx + t * idx_t + k, mask=here, other=-1)
            # A comparison with all experts in place of a scattered addition; -1 equals none.
            chosen += (expert[:, None] == e[None, :]).to(tl.float32)
            if JUDGED:
                expert = tl.load(judged + t * judged_t + k, mask=here, other=-1)
                best += (expert[:, None] == e[None, :]).to(tl.float32)
        if SCORED or LOG_SUM:
            real = here[:, None] & (e < E)[None, :]
            x = tl.load(logits + t[:, None] * E + e[None, :], mask=real, other=0.0)
            # Experts that only pad a power of two have a score of 0.
            x = tl.where((e < E)[None, :], x, float("-inf"))
            if SCORED:
                # Positions past the end have logits of 0, and so scores, which are left out.
                score += tl.where(here[:, None], balance_scores(x, SIGMOID), 0.0)
            if LOG_SUM:
                top = tl.max(x, 1)
                # Less the largest: no exponential overflows.
                log_sum = top + tl.log(tl.sum(tl.exp(x - top[:, None]), 1))
                squares += tl.where(here, log_sum * log_sum, 0.0)
    # Columns: choices, scores, judged choices, and the squares in the last one.
    to = parts + (tl.program_id(0).to(tl.int64) * B + b) * columns
    tl.store(to + e, tl.sum(chosen, 0), mask=e < E)
    if SCORED:
        tl.store(to + E + e, tl.sum(score, 0), mask=e < E)
    if JUDGED:
        tl.store(to + 2 * E + e, tl.sum(best, 0), mask=e < E)
    if LOG_SUM:
        tl.store(to + columns - 1, tl.sum(squares, 0))


@dataclass(frozen=True)
class RouterTally:
    """Sums over this rank's tokens, fp32; views of one tensor."""

    count_BE: Tensor  # choices
    judged_BE: Tensor  # choices that the losses evaluate: the same unless others were passed
    score_BE: Tensor | None  # scores
    squares_B: Tensor | None  # squares of log(sum(exp(logits)))


@torch.no_grad()
def tally(
    logits_TE: Tensor,
    idx_TK: Tensor,
    *,
    sequences: int,
    score: str | None,
    judged_TK: Tensor | None = None,
    log_sum: bool = False,
) -> RouterTally:
    """Count choices and sum scores, by sequence.

    Args:
        idx_TK, judged_TK: integers, contiguous within a token; the second only with scores.
        sequences: B, which divides T.
        score: `softmax`, or `sigmoid` over its sum; None sums none.
        log_sum: whether `squares_B` is wanted.
    """
    (T, E), K = logits_TE.shape, idx_TK.shape[1]
    rows, experts = _blocks(E)
    positions = T // sequences
    programs = triton.cdiv(positions, rows * _TURNS)
    kinds = 1 + (score is not None) + (judged_TK is not None)
    columns = kinds * E + log_sum
    parts = logits_TE.new_empty(programs, sequences, columns)
    if T:
        router_tally[(programs, sequences)](
            logits_TE,
            idx_TK,
            judged_TK,
            parts,
            positions,
            E,
            idx_TK.stride(0),
            0 if judged_TK is None else judged_TK.stride(0),
            columns,
            K=K,
            SCORED=score is not None,
            SIGMOID=score == "sigmoid",
            JUDGED=judged_TK is not None,
            LOG_SUM=log_sum,
            TURNS=_TURNS,
            ROWS=rows,
            EXPERTS=experts,
        )
    total = part_sum(parts)
    return RouterTally(
        total[:, :E],
        total[:, :E] if judged_TK is None else total[:, 2 * E : 3 * E],
        None if score is None else total[:, E : 2 * E],
        total[:, -1] if log_sum else None,
    )


@triton.jit
def router_losses(  # type: ignore[no-untyped-def]
    count,
    judged,
    score,
    squares,
    seen,
    tokens_per_expert,
    local_tokens,
    micro_batches,
    losses,
    loss,
    slope,
    aux,
    seq,
    overall,
    z,
    tokens,
    factor,
    E,
    count_b,
    judged_b,
    B: tl.constexpr,
    SCORED: tl.constexpr,
    LOG_SUM: tl.constexpr,
    SEEN: tl.constexpr,
    LOCAL: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    # One program for all: its work is E numbers a sequence. Counters are read and written plainly,
    # as kernels of a stream follow one another.
    e = tl.arange(0, EXPERTS)
    here = e < E
    chosen = tl.zeros([EXPERTS], tl.float32)
    for b in tl.static_range(B):
        chosen += tl.load(count + b * count_b + e, mask=here, other=0.0)
    # Exact: the counts of a micro-batch are whole numbers below 2^24.
    chosen = chosen.to(tl.int64)
    before = tl.load(tokens_per_expert + e, mask=here)
    tl.store(tokens_per_expert + e, before + chosen, mask=here)
    if LOCAL:
        before = tl.load(local_tokens + e, mask=here)
        tl.store(local_tokens + e, before + chosen, mask=here)
    tl.store(micro_batches, tl.load(micro_batches) + 1)
    total = 0.0
    if SCORED:
        all_scores = tl.zeros([EXPERTS], tl.float32)
        all_judged = tl.zeros([EXPERTS], tl.float32)
        for b in tl.static_range(B):
            all_scores += tl.load(score + b * count_b + e, mask=here, other=0.0)
            all_judged += tl.load(judged + b * judged_b + e, mask=here, other=0.0)
        # The losses are E * sum_i f_i P_i, with the mean P_i of scores over all tokens.
        scale = E / tokens
        fraction = all_judged / tl.sum(all_judged, 0)
        share = scale * tl.sum(all_scores * fraction, 0)
        common = aux * scale * fraction
        total += aux * share
        # Losses that are absent stay out of the statistics.
        if aux != 0.0:
            tl.store(losses, tl.load(losses) + share)
        if SEEN:
            reached = tl.load(seen + e, mask=here, other=0)
            # Summed as integers: over many micro-batches counts pass 2^24.
            fraction = reached.to(tl.float32) / tl.sum(reached, 0).to(tl.float32)
            share = scale * tl.sum(all_scores * fraction, 0)
            common += overall * scale * fraction
            total += overall * share
            tl.store(losses + 2, tl.load(losses + 2) + share)
        # Each sequence by its own choices. f_i has no gradient, so that the slope in a score of
        # expert i is the factor of that score in the losses.
        shares = 0.0
        for b in tl.static_range(B):
            mean = tl.load(score + b * count_b + e, mask=here, other=0.0)
            fraction = tl.load(judged + b * judged_b + e, mask=here, other=0.0)
            fraction = fraction / tl.sum(fraction, 0)
            shares += scale * tl.sum(mean * fraction, 0)
            rise = common + seq * scale * fraction
            tl.store(slope + b * E + e, rise * factor, mask=here)
        if seq != 0.0:
            total += seq * shares
            tl.store(losses + 1, tl.load(losses + 1) + shares)
    if LOG_SUM:
        share = 0.0
        for b in tl.static_range(B):
            share += tl.load(squares + b * count_b)
        share = share / tokens
        total += z * share
        tl.store(losses + 3, tl.load(losses + 3) + share)
    if SCORED or LOG_SUM:
        # Of this rank's scores: its share of the loss.
        tl.store(loss, total * factor)


@dataclass(frozen=True)
class Counters:
    """Buffers of a router that `Terms.finish` adds to."""

    tokens_per_expert: Tensor  # int64 [E], as `local_tokens` is
    local_tokens: Tensor | None
    micro_batches: Tensor  # int64 scalar
    losses: Tensor  # fp32 [4]: aux, seq_aux, global_aux and z loss, without coefficients


@dataclass(frozen=True)
class Terms:
    """Coefficients of the balancing losses; 0 is none."""

    aux: float
    seq_aux: float
    global_aux: float
    z: float
    tokens: float  # number of all tokens of the sequences, on all ranks
    factor: float = 1.0  # factor on the sum of the losses

    @torch.no_grad()
    def finish(
        self, tally_sums: RouterTally, judged_BE: Tensor, seen_E: Tensor | None, to: Counters
    ) -> tuple[Tensor, Tensor]:
        """Add to the counters; the weighted sum of the losses, and its slope in the scores.

        The sum is fp32 [1], and slope_BE its derivative by the score of a token of a sequence. Both
        are undefined if there are no losses, the second without scores.

        Args:
            judged_BE: that of the tally, summed over ranks.
            seen_E: int64, choices of all micro-batches so far and all ranks, for `global_aux`.
        """
        B, E = tally_sums.count_BE.shape
        loss, slope_BE = tally_sums.count_BE.new_empty(1), tally_sums.count_BE.new_empty(B, E)
        router_losses[(1,)](
            tally_sums.count_BE,
            judged_BE,
            tally_sums.score_BE,
            tally_sums.squares_B,
            seen_E,
            to.tokens_per_expert,
            to.local_tokens,
            to.micro_batches,
            to.losses,
            loss,
            slope_BE,
            *(self.aux, self.seq_aux, self.global_aux, self.z),
            self.tokens,
            self.factor,
            E,
            tally_sums.count_BE.stride(0),
            judged_BE.stride(0),
            B=B,
            SCORED=tally_sums.score_BE is not None,
            LOG_SUM=tally_sums.squares_B is not None,
            SEEN=seen_E is not None,
            LOCAL=to.local_tokens is not None,
            EXPERTS=triton.next_power_of_2(E),
        )
        return loss, slope_BE


@triton.jit
def router_losses_gradient(  # type: ignore[no-untyped-def]
    dloss,
    logits,
    slope,
    dlogits,
    z_slope,
    T,
    B,
    E,
    SCORED: tl.constexpr,
    SIGMOID: tl.constexpr,
    LOG_SUM: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    # A program has ROWS tokens and all experts: sums over a token's experts stay in it. The scores
    # are computed again from the logits: nothing but these was saved.
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    real = (t < T)[:, None] & (e < E)[None, :]
    at = t[:, None] * E + e[None, :]
    x = tl.load(logits + at, mask=real, other=0.0)
    x = tl.where((e < E)[None, :], x, float("-inf"))
    grad = tl.zeros([ROWS, EXPERTS], tl.float32)
    if SCORED:
        rise = tl.load(slope + (t % B)[:, None] * E + e[None, :], mask=real, other=0.0)
        score = balance_scores(x, SIGMOID)
        # Scores sum to 1: a rise that is the same for all experts changes nothing.
        mean = tl.sum(score * rise, 1)[:, None]
        if SIGMOID:
            s = sigmoids(x)
            # Through the division by the sum, then the sigmoid.
            grad = (rise - mean) * (s * (1.0 - s)) / (tl.sum(s, 1) + TINY)[:, None]
        else:
            grad = score * (rise - mean)
    if LOG_SUM:
        top = tl.max(x, 1)
        # The derivative of log(sum(exp)) is the softmax.
        each = tl.exp(x - top[:, None])
        total = tl.sum(each, 1)
        grad += each * (z_slope * (top + tl.log(total)) / total)[:, None]
    # From the device, where the loss is scaled: the host reads no value of it.
    tl.store(dlogits + at, grad * tl.load(dloss), mask=real)


def slope_to_logits(
    dloss: Tensor, logits_TE: Tensor, slope_BE: Tensor | None, score: str, z_slope: float
) -> Tensor:
    """Gradient of the logits from that of the weighted sum of the losses, fp32 [1].

    `z_slope`: derivative of the sum by a token's square of log(sum(exp(logits))), times 2.
    """
    T, E = logits_TE.shape
    dlogits_TE = torch.empty_like(logits_TE)
    rows, experts = _blocks(E)
    if T:
        router_losses_gradient[(triton.cdiv(T, rows),)](
            dloss,
            logits_TE,
            slope_BE,
            dlogits_TE,
            z_slope,
            T,
            1 if slope_BE is None else slope_BE.shape[0],
            E,
            SCORED=slope_BE is not None,
            SIGMOID=score == "sigmoid",
            LOG_SUM=z_slope != 0.0,
            ROWS=rows,
            EXPERTS=experts,
        )
    return dlogits_TE


def _blocks(E: int) -> tuple[int, int]:
    experts = triton.next_power_of_2(E)
    # A program reads about _ELEMENTS logits, whatever E is.
    return max(1, _ELEMENTS // experts), experts
