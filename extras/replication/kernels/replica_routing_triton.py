"""`extras.replication.kernels.replica_routing` on an NVIDIA GPU, in Triton.

Pairs are processed in chunks. The first launch counts the rows of each expert in every chunk, from
which the plan is computed; the second one numbers the pairs of replicated experts, which start in a
chunk where the chunks before it end. Counts are integers, so the order of sums is irrelevant.

Legend: N received rows, K expert ids of a token, P = N * K pairs, C chunks, E experts, R ranks, L
experts and G replica slots of a rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.extras.replication.kernels.replication_plan import ReplicationPlan

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


def assign_pairs(idx_NK: Tensor, counts_CE: Tensor, plan: ReplicationPlan) -> Tensor:
    """`extras.replication.kernels.replica_routing.assign_pairs`, from the counts of chunks."""
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
