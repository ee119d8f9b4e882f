"""`extras.replication.kernels.weights` through the addresses of other ranks' memory, in Triton.

Grids are fixed, whatever the plan: every program looks at all slots, takes its part of those that
concern this rank, and leaves at once where there are none.

Legend: R ranks, L own experts of a rank, G replica slots of a rank.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from phalanx.kernels.sm90.exchange.peer_buffers import (
    EPOCH,
    FINISHED_CTAS,
    MAX_RANKS,
    MAX_WAVES,
    SEEN,
    PeerBuffers,
)

_WARPS = 16
_SENT = 8192  # int32 words of a piece that a program copies
_ADDED = 4096  # elements of a piece of gradients that a program adds
_AHEAD = 4
"""Pieces in flight, in shared memory: a few SMs next to a GEMM fill a link only if they need not
wait for each piece (docs/kernels/log.md)."""


@triton.jit
def send_weights_kernel(  # type: ignore[no-untyped-def]
    w,
    b,
    w_memory_R,
    b_memory_R,
    w_words,
    b_words,
    next_w,
    next_b,
    next_w_memory_R,
    next_b_memory_R,
    next_w_words,
    next_b_words,
    slot_experts,
    begins,
    flags_R,
    state,
    waves,
    rank,
    ranks,
    L,
    G,
    BIAS: tl.constexpr,
    NEXT_BIAS: tl.constexpr,
    EPOCH_AT: tl.constexpr,
    COUNTS_AT: tl.constexpr,
    RANKS: tl.constexpr,
    SECOND: tl.constexpr,
    RUNNING: tl.constexpr,
    WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    epoch = tl.load(state + EPOCH_AT) + 1
    if tl.program_id(0) == 0:
        _raise(flags_R + rank, RUNNING * RANKS + rank, 1, epoch)
    for wave in range(waves):
        first, end = tl.load(begins + wave), tl.load(begins + wave + 1)
        _send(w, w_memory_R, w_words, slot_experts, first, end, rank, ranks, L, G, WORDS, AHEAD)
        if BIAS:
            _send(b, b_memory_R, b_words, slot_experts, first, end, rank, ranks, L, G, WORDS, AHEAD)
        if _last(state + COUNTS_AT + wave):
            _raise(flags_R, wave * RANKS + rank, ranks, epoch)
    _send(
        next_w, next_w_memory_R, next_w_words, slot_experts, 0, G, rank, ranks, L, G, WORDS, AHEAD
    )
    if NEXT_BIAS:
        _send(
            next_b,
            next_b_memory_R,
            next_b_words,
            slot_experts,
            0,
            G,
            rank,
            ranks,
            L,
            G,
            WORDS,
            AHEAD,
        )
    if _last(state + COUNTS_AT + SECOND):
        tl.store(state + EPOCH_AT, epoch)
        _raise(flags_R, SECOND * RANKS + rank, ranks, epoch)


@triton.jit
def _send(  # type: ignore[no-untyped-def]
    own,
    memory_R,
    words,
    slot_experts,
    first_slot,
    end_slot,
    rank,
    ranks,
    L,
    G,
    WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    piece = tl.arange(0, WORDS)
    for number in range(first_slot * ranks, end_slot * ranks):
        replica = number % ranks * G + number // ranks
        expert = tl.load(slot_experts + replica)
        if (expert >= 0) & (expert // L == rank):
            source = own + (expert - rank * L).to(tl.int64) * words
            to = _slot(memory_R, replica, G, words, tl.int32)
            first, step = tl.program_id(0) * WORDS, tl.num_programs(0) * WORDS
            for begin in tl.range(first, words, step, num_stages=AHEAD):
                at = begin + piece
                tl.store(to + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit
def _slot(memory_R, replica, G, size, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Pointer to a replica slot in its rank's memory, of `size` elements of 4 bytes."""
    address = tl.load(memory_R + replica // G) + (replica % G).to(tl.int64) * size * 4
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _last(count):  # type: ignore[no-untyped-def]
    """True in the last program to arrive: the stores of all can be published."""
    tl.debug_barrier()
    before = tl.atomic_add(count, 1, sem="acq_rel", scope="sys")
    last = before == tl.num_programs(0) - 1
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def _raise(flags_R, number, ranks, epoch):  # type: ignore[no-untyped-def]
    for r in range(ranks):
        address = tl.load(flags_R + r) + 4 * number
        tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), epoch, sem="release", scope="sys")


@triton.jit
def _await(  # type: ignore[no-untyped-def]
    flags_R, part, rank, ranks, epoch, limit, report, RANKS: tl.constexpr
):
    """Wait for all ranks' flags of a part; after `limit` ns report the late rank and trap."""
    own = tl.load(flags_R + rank) + 4 * part * RANKS
    for r in range(ranks):
        flag = (own + 4 * r).to(tl.pointer_type(tl.int32))
        flag_epoch = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        start = tl.zeros([], tl.int64)
        while flag_epoch - epoch < 0:
            time = globaltimer()
            start = tl.where(start == 0, time, start)
            if time - start > limit:
                tl.store(report + 1, epoch)
                tl.store(report + 2, flag_epoch)
                tl.store(report, r + 1)
                tl.debug_barrier()
                _stop()
            flag_epoch = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def _stop():  # type: ignore[no-untyped-def]
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; trap; mov.b32 $0, 0;", "=r", [], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def signal_grads_kernel(  # type: ignore[no-untyped-def]
    flags_R,
    state,
    part,
    rank,
    ranks,
    LAST: tl.constexpr,
    EPOCH_AT: tl.constexpr,
    SEEN_AT: tl.constexpr,
    RANKS: tl.constexpr,
):
    epoch = tl.load(state + EPOCH_AT) + 1
    _raise(flags_R, part * RANKS + rank, ranks, epoch)
    if LAST:
        tl.store(state + EPOCH_AT, epoch)
        tl.store(state + SEEN_AT, epoch)


@triton.jit
def reduce_grads_kernel(  # type: ignore[no-untyped-def]
    own,
    slot_experts,
    memory_R,
    flags_R,
    state,
    report,
    part,
    limit,
    size,
    rank,
    ranks,
    L,
    G,
    EPOCH_AT: tl.constexpr,
    RANKS: tl.constexpr,
    RUNNING: tl.constexpr,
    SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    epoch = tl.load(state + EPOCH_AT)
    if tl.program_id(0) == 0:
        _raise(flags_R + rank, RUNNING * RANKS + rank, 1, epoch)
    _await(flags_R, part, rank, ranks, epoch, limit, report, RANKS)
    piece = tl.arange(0, SIZE)
    for replica in range(ranks * G):
        expert = tl.load(slot_experts + replica)
        if (expert >= 0) & (expert // L == rank):
            to = own + (expert - rank * L).to(tl.int64) * size
            grads = _slot(memory_R, replica, G, size, tl.float32)
            first, step = tl.program_id(0) * SIZE, tl.num_programs(0) * SIZE
            for begin in tl.range(first, size, step, num_stages=AHEAD):
                at = begin + piece
                grad = tl.load(grads + at, mask=at < size, other=0.0)
                total = tl.load(to + at, mask=at < size, other=0.0).to(tl.float32) + grad
                tl.store(to + at, total.to(own.dtype.element_ty), mask=at < size)
            # Another slot may have the same expert, whose pieces other threads may have read:
            # without the barrier their sums would be lost.
            tl.debug_barrier()


# A rank raises flags at all ranks, by the number of the call, from 1. `PeerBuffers` of weights and
# of gradients have no rows and no side data, and int32 [MAX_WAVES + 2, MAX_RANKS] flags, 0 at
# first: in a call of `send_weights`
#
#     parts 0 to MAX_WAVES - 1   a wave of the slots has weights of the layer that is sent first
#     SECOND                     all slots have those of the other one
#     RUNNING                    of this rank only: `send_weights` has its SMs
#
# and in a call of `reduce_grads`
#
#     0 and 1    gradients of fc1, and of fc2, are complete
#     RUNNING    of this rank only: `reduce_grads` has its SMs
SECOND, RUNNING = MAX_WAVES, MAX_WAVES + 1

SentLayer = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""Weights of a layer, its biases or None, and int64 addresses of each rank's slots for both."""


def send_weights(
    layers: Sequence[SentLayer],
    expert_RG: Tensor,
    begins_W: Tensor,
    buffers: PeerBuffers,
    *,
    sms: int,
) -> None:
    """`weights.send_weights` of two layers, in one launch: a second one would wait for SMs.

    Args:
        layers: weights are contiguous, an expert's in a multiple of 16 bytes, as in all memory of
            slots; others are a ValueError.
        expert_RG: int32, contiguous.
        begins_W: int32, `kernels.sm90.exchange.peer_buffers.wave_begins` of G slots.
        buffers: flags of weights.
    """
    R, G = expert_RG.shape
    args: list[Tensor | int] = []
    for w_L, b_L, w_memory_R, b_memory_R in layers:
        both = [w_L, w_L if b_L is None else b_L]
        for own_L in both:
            _check(own_L)
        words = [own_L[0].numel() * own_L.element_size() // 4 for own_L in both]
        args += [own_L.view(len(own_L), -1).view(torch.int32) for own_L in both]
        args += [w_memory_R, b_memory_R, *words]
    send_weights_kernel[(sms,)](
        *(*args, expert_RG, begins_W, buffers.flags_R, buffers.state),
        *(len(begins_W) - 1, buffers.rank, R, len(layers[0][0]), G),
        BIAS=layers[0][1] is not None,
        NEXT_BIAS=layers[1][1] is not None,
        EPOCH_AT=EPOCH,
        COUNTS_AT=FINISHED_CTAS,
        RANKS=MAX_RANKS,
        SECOND=SECOND,
        RUNNING=RUNNING,
        WORDS=_SENT,
        AHEAD=_AHEAD,
        num_warps=_WARPS,
    )


def send_grads(buffers: PeerBuffers, layer: int) -> None:
    """Signal that gradients of layer 0 (fc1), then 1 (fc2) are complete, after earlier kernels."""
    signal_grads_kernel[(1,)](
        *(buffers.flags_R, buffers.state, layer, buffers.rank, len(buffers.flags_R)),
        LAST=layer == 1,
        EPOCH_AT=EPOCH,
        SEEN_AT=SEEN,
        RANKS=MAX_RANKS,
        num_warps=1,
    )


def reduce_grads(
    own_L: Tensor,
    expert_RG: Tensor,
    memory_R: Tensor,
    buffers: PeerBuffers,
    *,
    layer: int,
    sms: int,
) -> None:
    """`weights.reduce_grads`, once all ranks have signalled.

    It waits on the SMs that it needs: GEMMs of other streams would take SMs that are free when the
    flags arrive. `memory_R` are int64 addresses of [G, ...] of each rank; other arguments are those
    of `send_weights` and `send_grads`.
    """
    R, G = expert_RG.shape
    _check(own_L)
    reduce_grads_kernel[(sms,)](
        *(own_L, expert_RG, memory_R, buffers.flags_R, buffers.state, buffers.report),
        *(layer, 1_000_000 * buffers.limit_ms, own_L[0].numel()),
        *(buffers.rank, R, len(own_L), G),
        EPOCH_AT=EPOCH,
        RANKS=MAX_RANKS,
        RUNNING=RUNNING,
        SIZE=_ADDED,
        AHEAD=_AHEAD,
        num_warps=_WARPS,
    )


def _check(own_L: Tensor) -> None:
    size = own_L[0].numel() * own_L.element_size()
    if not own_L.is_contiguous() or size % 16:
        raise ValueError(
            f"weights of experts are copied by address: they must be contiguous and of a multiple "
            f"of 16 bytes each, not {list(own_L.shape)} with strides {list(own_L.stride())}"
        )
