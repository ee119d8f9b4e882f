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
_LENT = 16384
"""int32 that a program has under way: eight accesses of 16 bytes a thread."""
_ADDED = 8192
"""Gradients that a program has under way."""


@triton.jit
def lend_kernel(own, held, memory_R, words, rank, L, G, slots, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    piece = tl.arange(0, WORDS)
    for slot in range(slots):
        expert = tl.load(held + slot)
        if (expert >= 0) & (expert // L == rank):
            source = own + (expert - rank * L).to(tl.int64) * words
            at_slot = (slot % G).to(tl.int64) * words * 4
            address = tl.load(memory_R + slot // G) + at_slot
            to = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
            for first in range(tl.program_id(0) * WORDS, words, tl.num_programs(0) * WORDS):
                at = first + piece
                tl.store(to + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit
def take_back_kernel(  # type: ignore[no-untyped-def]
    own, held, memory_R, size, rank, L, G, slots, SLOTS: tl.constexpr, SIZE: tl.constexpr
):
    piece = tl.arange(0, SIZE)
    s = tl.arange(0, SLOTS)
    held_s = tl.load(held + s, mask=s < slots, other=-1)
    for slot in range(slots):
        expert = tl.load(held + slot)
        if (expert >= 0) & (expert // L == rank):
            # The first of an expert's slots stands for all of them.
            if tl.sum(((held_s == expert) & (s < slot)).to(tl.int32), 0) == 0:
                to = own + (expert - rank * L).to(tl.int64) * size
                for first in range(tl.program_id(0) * SIZE, size, tl.num_programs(0) * SIZE):
                    at = first + piece
                    total = tl.load(to + at, mask=at < size)
                    for other in range(slot, slots):
                        if tl.load(held + other) == expert:
                            at_slot = (other % G).to(tl.int64) * size * 4
                            address = tl.load(memory_R + other // G) + at_slot
                            room = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
                            grad = tl.load(room + at, mask=at < size, other=0.0)
                            total = (total.to(tl.float32) + grad).to(own.dtype.element_ty)
                    tl.store(to + at, total, mask=at < size)


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
        num_warps=_WARPS,
    )


def take_back(own_L: Tensor, expert_RG: Tensor, memory_R: Tensor, *, rank: int, sms: int) -> None:
    """`kernels.clones.weights.take_back`; arguments as of `lend`."""
    R, G = expert_RG.shape
    _check(own_L)
    take_back_kernel[(sms,)](
        *(own_L, expert_RG, memory_R),
        *(own_L[0].numel(), rank, len(own_L), G, R * G),
        SLOTS=triton.next_power_of_2(R * G),
        SIZE=_ADDED,
        num_warps=_WARPS,
    )


def _check(own_L: Tensor) -> None:
    size = own_L[0].numel() * own_L.element_size()
    if not own_L.is_contiguous() or size % 16:
        raise ValueError(
            f"weights of experts are copied by address: they must be contiguous and of a multiple "
            f"of 16 bytes each, not {list(own_L.shape)} with strides {list(own_L.stride())}"
        )
