"""`extras.replication.kernels.replication_plan` in Triton: the plan in one launch of one program.

For pairs, which are processed in chunks, a launch before it counts the rows of each expert in every
chunk, from which the plan is computed; one after it numbers the pairs of replicated experts, which
start in a chunk where the chunks before it end. Counts are integers, so the order of sums is
irrelevant.

Legend: E experts, R ranks, L experts of a rank, N replica slots of a rank; for pairs N received
rows, K expert ids of a token, P = N * K pairs, C chunks, G replica slots.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNKS = 16  # chunks per tile of the reduction


@triton.jit
def _first(mask, index, end):  # type: ignore[no-untyped-def]
    return tl.min(tl.where(mask, index, end), 0)


@triton.jit
def _at(x, mask):  # type: ignore[no-untyped-def]
    return tl.sum(tl.where(mask, x, 0), 0)


@triton.jit
def replication_plan_kernel(  # type: ignore[no-untyped-def]
    counts,
    slots,
    owner_rows,
    load,
    C,
    E,
    cost,
    least,
    tile,
    L: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    N_OR_1: tl.constexpr,
    SLOTS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    e = tl.arange(0, EXPERTS)
    r = tl.arange(0, RANKS)
    s = tl.arange(0, SLOTS)  # slot n of rank r is r * N + n
    c = tl.arange(0, CHUNKS)
    rows = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, C, CHUNKS):
        at = (first + c)[:, None] * E + e[None, :]
        inside = (first + c < C)[:, None] & (e < E)[None, :]
        rows += tl.sum(tl.load(counts + at, mask=inside, other=0), 0)
    owner_of = e // L
    # Ranks beyond R have load -1: they are never the largest, and never borrow.
    before = tl.sum(tl.where(owner_of[None, :] == r[:, None], rows[None, :], 0), 1)
    loads = tl.where(r < R, before, -1)
    used = tl.where(r < R, 0, N)
    expert_s = tl.full([SLOTS], -1, tl.int32)
    begin_s = tl.zeros([SLOTS], tl.int32)
    end_s = tl.zeros([SLOTS], tl.int32)
    best_expert, best_begin, best_end = expert_s, begin_s, end_s
    best_rows, best_loads, count = rows, loads, rows
    best_most = tl.max(loads, 0)
    going = 1
    while going > 0:
        most_load = tl.max(loads, 0)
        owner = _first(loads == most_load, r, RANKS)
        owned_rows = tl.where((owner_of == owner) & (e < E), rows, -1)
        expert_rows = tl.max(owned_rows, 0)
        expert = _first(owned_rows == expert_rows, e, EXPERTS)
        copies = (expert_s == expert)[None, :] & ((s // N_OR_1)[None, :] == r[:, None])
        open_r = (used < N) & (r != owner) & (tl.max(copies.to(tl.int32), 1) == 0)
        open_load = tl.where(open_r, loads, most_load + 1)
        borrower = _first(open_load == tl.min(open_load, 0), r, RANKS)
        high = most_load + cost
        low = _at(loads, r == borrower) + cost
        total = tl.sum(tl.where(r < R, loads, 0), 0)
        mean = (total + 2 * cost + R - 1) // R
        # Row: a rank. Column: an open rank that is not after it in the order of loads.
        ahead = (loads[None, :] < loads[:, None]) | (
            (loads[None, :] == loads[:, None]) & (r[None, :] <= r[:, None])
        )
        ahead = ahead & open_r[None, :]
        copies_r = tl.sum(ahead.to(tl.int32), 1)
        sum_r = tl.sum(tl.where(ahead, loads[None, :], 0), 1)
        mean_r = (most_load + sum_r + 2 * cost * copies_r + copies_r) // (copies_r + 1)
        level_r = tl.where(open_r, tl.maximum(mean_r, cost * copies_r), most_load)
        level = tl.maximum(mean, tl.min(level_r, 0))
        most = tl.minimum(expert_rows, tl.minimum(high - level, level - low))
        begin = (expert_rows - most + tile - 1) // tile * tile
        moved = expert_rows - begin
        gains = tl.maximum(high - moved, low + moved) < high - cost
        can = tl.max(open_r.to(tl.int32), 0) > 0
        going = tl.where(can & (moved > 0) & gains, 1, 0)
        if going > 0:
            slot_mask = s == borrower * N + _at(used, r == borrower)
            expert_s = tl.where(slot_mask, expert, expert_s)
            begin_s = tl.where(slot_mask, begin, begin_s)
            end_s = tl.where(slot_mask, expert_rows, end_s)
            rows = tl.where(e == expert, begin, rows)
            loads = tl.where(r == owner, high - moved, loads)
            loads = tl.where(r == borrower, low + moved, loads)
            used = tl.where(r == borrower, used + 1, used)
            better = tl.max(loads, 0) < best_most
            best_most = tl.minimum(tl.max(loads, 0), best_most)
            best_expert = tl.where(better, expert_s, best_expert)
            best_begin = tl.where(better, begin_s, best_begin)
            best_end = tl.where(better, end_s, best_end)
            best_rows = tl.where(better, rows, best_rows)
            best_loads = tl.where(better, loads, best_loads)
    worth = tl.max(before, 0) - best_most >= least
    best_expert = tl.where(worth, best_expert, -1)
    best_begin = tl.where(worth, best_begin, 0)
    best_end = tl.where(worth, best_end, 0)
    best_rows = tl.where(worth, best_rows, count)
    best_loads = tl.where(worth, best_loads, before)
    in_use = s < R * N
    tl.store(slots + s, best_expert, mask=in_use)
    tl.store(slots + R * N + s, best_begin, mask=in_use)
    tl.store(slots + 2 * R * N + s, best_end, mask=in_use)
    tl.store(owner_rows + e, best_rows, mask=e < E)
    tl.store(load + r, before, mask=r < R)
    tl.store(load + R + r, best_loads, mask=r < R)


def replication_plan_in_triton(counts_CE: Tensor, size: tuple[int, ...]) -> tuple[Tensor, ...]:
    """`replication_plan.make_replication_plan` of sizes that were checked."""
    (R, N, cost, tile, least), (C, E) = size, counts_CE.shape
    slot_3RN = counts_CE.new_empty(3, R, N)
    owner_rows_E, load_2R = counts_CE.new_empty(E), counts_CE.new_empty(2, R)
    replication_plan_kernel[(1,)](
        counts_CE.contiguous(),
        slot_3RN,
        owner_rows_E,
        load_2R,
        *(C, E, cost, least, tile),
        L=E // R,
        R=R,
        N=N,
        EXPERTS=triton.next_power_of_2(E),
        RANKS=triton.next_power_of_2(R),
        N_OR_1=max(N, 1),
        SLOTS=triton.next_power_of_2(R * max(N, 1)),
        CHUNKS=min(_CHUNKS, triton.next_power_of_2(C)),
        num_warps=1 if E <= 128 else 4,
    )
    expert_RN, begin_RN, end_RN = slot_3RN
    return expert_RN, begin_RN, end_RN, owner_rows_E, load_2R


_CHUNK = 2048


@triton.jit
def count_chunks_kernel(idx, counts, P, E, BINS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(idx + at, mask=at < P, other=-1)
    count = tl.histogram(tl.where(expert >= 0, expert, 0), BINS, mask=expert >= 0)
    e = tl.arange(0, BINS)
    tl.store(counts + chunk * E + e, count, mask=e < E)


@triton.jit
def assign_pairs_kernel(  # type: ignore[no-untyped-def]
    idx,
    counts,
    slot_experts,
    begins,
    ends,
    pair_slots,
    P,
    E,
    slots,
    L,
    G,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(idx + at, mask=at < P, other=-1)
    slot_of_pair = tl.where(expert >= 0, expert // L * (L + G) + expert % L, -1)
    earlier = tl.arange(0, CHUNKS)
    for slot in range(slots):
        slot_expert = tl.load(slot_experts + slot)
        if slot_expert >= 0:
            before = tl.load(counts + earlier * E + slot_expert, mask=earlier < chunk, other=0)
            matches = expert == slot_expert
            number = tl.sum(before, 0) + tl.cumsum(matches.to(tl.int32), 0) - 1
            taken = matches & (number >= tl.load(begins + slot)) & (number < tl.load(ends + slot))
            slot_of_pair = tl.where(taken, slot // G * (L + G) + L + slot % G, slot_of_pair)
    tl.store(pair_slots + at, slot_of_pair, mask=at < P)


def count_chunks(idx_NK: Tensor, experts: int) -> Tensor:
    """Number of rows of each expert in each chunk, int32 [C, E]."""
    pairs = idx_NK.numel()
    counts_CE = idx_NK.new_empty(triton.cdiv(pairs, _CHUNK), experts)
    if pairs:
        bins = triton.next_power_of_2(experts)
        count_chunks_kernel[(len(counts_CE),)](
            idx_NK.contiguous(), counts_CE, pairs, experts, BINS=bins, CHUNK=_CHUNK
        )
    return counts_CE


def assign_pairs(idx_NK: Tensor, counts_CE: Tensor, plan: Any) -> Tensor:
    """`replication_plan.assign_pairs`, from the counts of chunks."""
    (R, G), (C, E), pairs = plan.expert_RN.shape, counts_CE.shape, idx_NK.numel()
    slot_NK = torch.empty_like(idx_NK, memory_format=torch.contiguous_format)
    if pairs:
        assign_pairs_kernel[(C,)](
            idx_NK.contiguous(),
            counts_CE,
            plan.expert_RN,
            plan.begin_RN,
            plan.end_RN,
            slot_NK,
            *(pairs, E, R * G, E // R, G),
            CHUNKS=triton.next_power_of_2(C),
            CHUNK=_CHUNK,
            num_warps=8,
        )
    return slot_NK
