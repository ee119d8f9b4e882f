"""`kernels.clones.weights` through the addresses of other ranks' memory, in Triton.

Grids are fixed, whatever the plan: every program looks at all slots, takes its part of those that
concern this rank, and leaves at once where there are none.

Legend: R ranks, L own experts of a rank, G guest slots of a rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    own, held, memory_R, words, rank, L, G, slots, WORDS: tl.constexpr, AHEAD: tl.constexpr
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


def lend(own_L: Tensor, expert_RG: Tensor, memory_R: Tensor, *, rank: int, sms: int) -> None:
    """`kernels.clones.weights.lend`.

    Args:
        own_L: contiguous; an expert's in a multiple of 16 bytes, as in all memory of slots.
        expert_RG: int32, contiguous.
        memory_R: int64, addresses of [G, ...] of each rank.
        rank: this one.
        sms: SMs that it takes.

    Raises:
        ValueError: weights that do not lie one after the other.
    """
    _check(own_L)
    (R, G), words = expert_RG.shape, own_L[0].numel() * own_L.element_size() // 4
    lend_kernel[(sms,)](
        *(own_L.view(len(own_L), -1).view(torch.int32), expert_RG, memory_R),
        *(words, rank, len(own_L), G, R * G),
        WORDS=_LENT,
        AHEAD=_AHEAD,
        num_warps=_WARPS,
    )


def take_back(own_L: Tensor, expert_RG: Tensor, memory_R: Tensor, *, rank: int, sms: int) -> None:
    """`kernels.clones.weights.take_back`; arguments as of `lend`."""
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
