"""`kernels.clones.weights` through the addresses of other ranks' memory, in Triton.

Grids are fixed, whatever the plan: every program looks at all slots, takes its part of those that
concern this rank, and leaves at once where there are none.

Legend: R ranks, L own experts of a rank, G guest slots of a rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.sm90.exchange.peer_buffers import EPOCH, FINISHED_CTAS, MAX_RANKS

_WARPS = 16
_LENT = 8192
"""int32 of a piece that a program copies."""
_ADDED = 4096
"""Gradients of a piece that a program adds."""
_AHEAD = 4
"""Pieces under way, in shared memory: beside a GEMM a few SMs fill a link only if they need not
wait for each (docs/kernels/log.md)."""


@triton.jit
def lend_kernel(  # type: ignore[no-untyped-def]
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
    held,
    flags_R,
    state,
    rank,
    ranks,
    L,
    G,
    BIAS: tl.constexpr,
    NEXT_BIAS: tl.constexpr,
    EPOCH_AT: tl.constexpr,
    COUNTS_AT: tl.constexpr,
    PART: tl.constexpr,
    WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    epoch = tl.load(state + EPOCH_AT) + 1
    if tl.program_id(0) == 0:  # this rank's, that the programs have their SMs
        _raise(flags_R + rank, 2 * PART + rank, 1, epoch)
    slots = ranks * G
    _lend(w, w_memory_R, w_words, held, rank, L, G, slots, WORDS, AHEAD)
    if BIAS:
        _lend(b, b_memory_R, b_words, held, rank, L, G, slots, WORDS, AHEAD)
    if _last(state + COUNTS_AT):
        _raise(flags_R, rank, ranks, epoch)
    _lend(next_w, next_w_memory_R, next_w_words, held, rank, L, G, slots, WORDS, AHEAD)
    if NEXT_BIAS:
        _lend(next_b, next_b_memory_R, next_b_words, held, rank, L, G, slots, WORDS, AHEAD)
    if _last(state + COUNTS_AT + 1):
        tl.store(state + EPOCH_AT, epoch)
        _raise(flags_R, PART + rank, ranks, epoch)


@triton.jit
def _lend(  # type: ignore[no-untyped-def]
    own, memory_R, words, held, rank, L, G, slots, WORDS: tl.constexpr, AHEAD: tl.constexpr
):
    piece = tl.arange(0, WORDS)
    for slot in range(slots):
        expert = tl.load(held + slot)
        if (expert >= 0) & (expert // L == rank):
            source = own + (expert - rank * L).to(tl.int64) * words
            at_slot = (slot % G).to(tl.int64) * words * 4
            address = tl.load(memory_R + slot // G) + at_slot
            to = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
            first, step = tl.program_id(0) * WORDS, tl.num_programs(0) * WORDS
            for begin in tl.range(first, words, step, num_stages=AHEAD):
                at = begin + piece
                tl.store(to + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit
def _last(count):  # type: ignore[no-untyped-def]
    """Whether all programs have come here, and their stores can be published."""
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
def take_back_kernel(  # type: ignore[no-untyped-def]
    own, held, memory_R, size, rank, L, G, slots, SIZE: tl.constexpr, AHEAD: tl.constexpr
):
    piece = tl.arange(0, SIZE)
    for slot in range(slots):
        expert = tl.load(held + slot)
        if (expert >= 0) & (expert // L == rank):
            to = own + (expert - rank * L).to(tl.int64) * size
            at_slot = (slot % G).to(tl.int64) * size * 4
            address = tl.load(memory_R + slot // G) + at_slot
            room = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
            first, step = tl.program_id(0) * SIZE, tl.num_programs(0) * SIZE
            for begin in tl.range(first, size, step, num_stages=AHEAD):
                at = begin + piece
                grad = tl.load(room + at, mask=at < size, other=0.0)
                total = tl.load(to + at, mask=at < size, other=0.0).to(tl.float32) + grad
                tl.store(to + at, total.to(own.dtype.element_ty), mask=at < size)
            # Another slot may have the same expert, whose pieces other threads may have read.
            tl.debug_barrier()


class Flags(NamedTuple):
    """That a rank raises at all ranks when they have their guests."""

    flags_R: Tensor
    """int64, addresses of each rank's: int32, that of part p and rank r at p * MAX_RANKS + r."""
    state: Tensor
    """int32 [STATE] of `kernels.sm90.exchange.peer_buffers`, 0 at first."""


Lending = tuple[Tensor, Tensor | None, Tensor, Tensor]
"""A layer's weights, and biases or None, as in `lend`; and int64 addresses of each rank's slots for
either."""


def lend(
    layers: Sequence[Lending], expert_RG: Tensor, flags: Flags, *, rank: int, sms: int
) -> None:
    """`kernels.clones.weights.lend` of two layers, in one launch: kernels that follow would wait
    for SMs. When a layer is there, its part of the flags gets the number of the call, from 1.

    Args:
        layers: the first and the second one. Weights are contiguous, an expert's in a multiple of
            16 bytes, as in all memory of slots.
        expert_RG: int32, contiguous.
        flags: those of part 0 are the first layer's; part 2 says that the kernel is running, to
            this rank alone.
        rank: this one.
        sms: SMs that it takes.

    Raises:
        ValueError: weights that do not lie one after the other.
    """
    R, G = expert_RG.shape
    given: list[Tensor | int] = []
    for w_L, b_L, w_memory_R, b_memory_R in layers:
        both = [w_L, w_L if b_L is None else b_L]
        for own_L in both:
            _check(own_L)
        words = [own_L[0].numel() * own_L.element_size() // 4 for own_L in both]
        given += [own_L.view(len(own_L), -1).view(torch.int32) for own_L in both]
        given += [w_memory_R, b_memory_R, *words]
    lend_kernel[(sms,)](
        *(*given, expert_RG, *flags),
        *(rank, R, len(layers[0][0]), G),
        BIAS=layers[0][1] is not None,
        NEXT_BIAS=layers[1][1] is not None,
        EPOCH_AT=EPOCH,
        COUNTS_AT=FINISHED_CTAS,
        PART=MAX_RANKS,
        WORDS=_LENT,
        AHEAD=_AHEAD,
        num_warps=_WARPS,
    )


def take_back(own_L: Tensor, expert_RG: Tensor, memory_R: Tensor, *, rank: int, sms: int) -> None:
    """`kernels.clones.weights.take_back`; arguments as of `lend`, and `memory_R`: int64, addresses
    of [G, ...] of each rank."""
    R, G = expert_RG.shape
    _check(own_L)
    take_back_kernel[(sms,)](
        *(own_L, expert_RG, memory_R),
        *(own_L[0].numel(), rank, len(own_L), G, R * G),
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
