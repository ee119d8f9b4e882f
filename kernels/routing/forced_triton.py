"""A forced choice of experts with its probabilities, and the gradient of router logits, in Triton.

The choice is from a table, in place of the router's: that of `moe.router.forced`. Probabilities are
those of `kernels.routing.topk_scores`, in one pass over the tokens.

Legend: T tokens, E experts in G groups of M members, K experts per token, P rows of the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.elementwise.sums_triton import part_sum
from phalanx.kernels.routing.balance_triton import TINY, sigmoids

_ELEMENTS = 2048  # logits that a program has at a time
WEIGHTS = ("softmax", "softmax_all", "sigmoid", "sigmoid_sum")
"""Softmax over the chosen or all logits, sigmoids plain or over their sum."""


@triton.jit
def router_forced(  # type: ignore[no-untyped-def]
    logits,
    table,
    idx,
    prob,
    first,
    scale,
    T,
    E,
    G,
    P,
    RECORDED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    # A program has ROWS tokens with all of their K slots. Programs share nothing.
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, SLOTS)[None, :]
    here = (t < T)[:, None] & (k < K)
    # The token's number in its group of ranks: the choice does not depend on the layout.
    n = t + first
    M = E // G
    if RECORDED:
        # Recorded experts, from the first token on again when the recording ends.
        chosen = tl.load(table + (n % P)[:, None] * K + k, mask=here, other=0).to(tl.int32)
    else:
        # A row of the table serves E tokens in succession, each from one expert further on, so that
        # every expert is chosen equally often. Groups and members are shifted apart: the table
        # decides of how many groups a token has experts.
        expert = (n % E)[:, None]
        at = table + (((n // E) % P)[:, None] * K + k) * 2
        group = (expert // M + tl.load(at, mask=here, other=0)) % G
        member = (expert + tl.load(at + 1, mask=here, other=0)) % M
        chosen = group * M + member
    x = tl.load(logits + t[:, None] * E + chosen, mask=here, other=0.0)
    # Slots that only pad a power of two have a probability of 0.
    x = tl.where(k < K, x, float("-inf"))
    # Numbers of `WEIGHTS`. Each is compiled alone.
    if WEIGHTS == 0:
        p = tl.exp(x - tl.max(x, 1)[:, None])
        p = p / tl.sum(p, 1)[:, None]
    elif WEIGHTS == 1:
        e = tl.arange(0, EXPERTS)[None, :]
        # The sum is over all logits: the whole row is read, of which the others read K.
        row = tl.load(logits + t[:, None] * E + e, mask=(t < T)[:, None] & (e < E), other=0.0)
        row = tl.where(e < E, row, float("-inf"))
        top = tl.max(row, 1)[:, None]
        p = tl.exp(x - top) / tl.sum(tl.exp(row - top), 1)[:, None]
    else:
        p = sigmoids(x)
        if WEIGHTS == 3:
            p = p / (tl.sum(p, 1) + TINY)[:, None]
    to = t[:, None] * K + k
    tl.store(idx + to, chosen.to(tl.int32), mask=here)
    tl.store(prob + to, p * scale, mask=here)


def forced(
    logits_TE: Tensor, table: Tensor, first: int, *, groups: int, weights: str, scale: float
) -> tuple[Tensor, Tensor]:
    """Experts of tokens `first`, `first` + 1, ... as int32, and their probabilities, fp32.

    Args:
        logits_TE: fp32, contiguous.
        table: contiguous. int64 [P, K, 2]: offsets in groups and in members of a token's experts
            from the token's number, one row for every E tokens, cyclic; or int16 [P, K]: experts,
            one row for every token, cyclic.
        first: number of the first token in its expert-parallel group.
        weights: one of `WEIGHTS`.
    """
    (T, E), (P, K) = logits_TE.shape, table.shape[:2]
    idx_TK = logits_TE.new_empty(T, K, dtype=torch.int32)
    prob_TK = logits_TE.new_empty(T, K)
    slots, experts = triton.next_power_of_2(K), triton.next_power_of_2(E)
    # The others read one logit a slot, for which memory moves 32 bytes: 8 logits.
    rows = max(1, _ELEMENTS // (experts if weights == "softmax_all" else 8 * slots))
    if T:
        router_forced[(triton.cdiv(T, rows),)](
            logits_TE,
            table,
            idx_TK,
            prob_TK,
            first,
            scale,
            *(T, E, groups, P),
            RECORDED=table.ndim == 2,
            WEIGHTS=WEIGHTS.index(weights),
            K=K,
            ROWS=rows,
            SLOTS=slots,
            EXPERTS=experts,
        )
    return idx_TK, prob_TK


_TURNS = 4  # blocks of tokens per program


@triton.jit
def router_gradient_split(  # type: ignore[no-untyped-def]
    grad,
    both,
    parts,
    T,
    E,
    SUMMED: tl.constexpr,
    TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    e = tl.arange(0, EXPERTS)
    # A program has TURNS blocks of ROWS tokens, and a row of parts that is its own: the sum has a
    # fixed order, without atomics.
    sums = tl.zeros([ROWS, EXPERTS], tl.float32)
    for turn in range(TURNS):
        t = (tl.program_id(0).to(tl.int64) * TURNS + turn) * ROWS + tl.arange(0, ROWS)
        here = (t < T)[:, None] & (e < E)[None, :]
        x = tl.load(grad + t[:, None] * E + e[None, :], mask=here, other=0.0)
        high = x.to(tl.bfloat16)
        # What rounding left, exact in fp32. Both together have some 16 bits of the gradient, and
        # two products in bf16 take the place of one in fp32.
        rest = (x - high.to(tl.float32)).to(tl.bfloat16)
        to = both + t[:, None] * (2 * E) + e[None, :]
        # Side by side in a row: one GEMM reads both as channels.
        tl.store(to, high, mask=here)
        tl.store(to + E, rest, mask=here)
        if SUMMED:
            sums += x
    if SUMMED:
        tl.store(parts + tl.program_id(0) * E + e, tl.sum(sums, 0), mask=e < E)


def split(grad_TE: Tensor, summed: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """fp32 gradients as nearest bf16 and bf16 rest, side by side, [T, 2 E], and their sum [E].

    `summed`: dtype of the sum; None: no sum.
    """
    T, E = grad_TE.shape
    both = grad_TE.new_empty(T, 2 * E, dtype=torch.bfloat16)
    experts = triton.next_power_of_2(E)
    rows = max(1, _ELEMENTS // experts)
    programs = triton.cdiv(T, rows * _TURNS)
    parts = None if summed is None else grad_TE.new_empty(programs, E)
    if T:
        router_gradient_split[(programs,)](
            grad_TE,
            both,
            parts,
            *(T, E),
            SUMMED=parts is not None,
            TURNS=_TURNS,
            ROWS=rows,
            EXPERTS=experts,
        )
    return both, None if parts is None else part_sum(parts, summed)
