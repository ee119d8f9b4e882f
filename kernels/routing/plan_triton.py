"""Triton kernels of `kernels.routing.plan` beside the plan itself: packed routing, and an order.

Legend: T tokens of a rank, K slots of a token, R ranks, N = R * T received rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 64  # tokens of a program of `pack_routing`
_BLOCK = 1024  # pairs of a program of `unpack_routing`


@triton.jit
def pack_routing(  # type: ignore[no-untyped-def]
    idx,
    bits,
    side,
    rows,
    T,
    local,
    pairs,
    K: tl.constexpr,
    R: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    # A program has ROWS tokens: it copies their ids and probabilities into the block that is sent,
    # and finds the ranks that send a sum back.
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, SLOTS)
    r = tl.arange(0, RANKS)
    at = t[:, None] * K + k[None, :]
    here = (t < T)[:, None] & (k < K)[None, :]
    expert = tl.load(idx + at, mask=here, other=-1)
    tl.store(side + at, expert, mask=here)
    tl.store(side + pairs + at, tl.load(bits + at, mask=here, other=0), mask=here)
    # Triton divides towards zero: -1 // local would be rank 0.
    of = tl.where(expert >= 0, expert // local, -1)
    # Once for a rank, however many of the token's experts it has.
    wanted = tl.max((of[:, :, None] == r[None, None, :]).to(tl.int32), axis=1)
    # Where the sum of rank r arrives here, in the buffer of what comes back.
    row = r[None, :] * T + t[:, None]
    there = (t < T)[:, None] & (r < R)[None, :]
    tl.store(rows + t[:, None] * R + r[None, :], tl.where(wanted > 0, row, -1), mask=there)


@triton.jit
def unpack_routing(blocks, idx, bits, pairs, pitch, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # A program has BLOCK pairs of one rank's block, of which `pitch` numbers were sent: ids,
    # probabilities, and padding that is left behind.
    rank = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = i < pairs
    block = blocks + rank * pitch
    tl.store(idx + rank * pairs + i, tl.load(block + i, mask=here), mask=here)
    tl.store(bits + rank * pairs + i, tl.load(block + pairs + i, mask=here), mask=here)


def pack(idx_TK: Tensor, bits_TK: Tensor, side: Tensor, rows_TR: Tensor, local: int) -> None:
    """Fill `side` and `rows_TR`."""
    (T, K), R = idx_TK.shape, rows_TR.shape[1]
    if T == 0:
        return
    sizes = dict(K=K, R=R, SLOTS=triton.next_power_of_2(K), RANKS=triton.next_power_of_2(R))
    grid = (triton.cdiv(T, _ROWS),)
    pack_routing[grid](idx_TK, bits_TK, side, rows_TR, T, local, T * K, **sizes, ROWS=_ROWS)


def unpack(blocks_RP: Tensor, idx_NK: Tensor, bits_NK: Tensor) -> None:
    """Fill ids and bits of probabilities."""
    R, pitch = blocks_RP.shape
    pairs = idx_NK.numel() // R
    if pairs:
        grid = (triton.cdiv(pairs, _BLOCK), R)
        unpack_routing[grid](blocks_RP, idx_NK, bits_NK, pairs, pitch, BLOCK=_BLOCK)


@triton.jit
def split_order_kernel(order, out, P, own, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    # One program: prefix sums over all slots are its own.
    i = tl.arange(0, SLOTS)
    slot = tl.load(order + i, mask=i < P, other=SLOTS)
    is_own = (slot < own).to(tl.int32)
    is_replica = 1 - is_own
    # A place is the number of the same kind before: both parts keep their order.
    own_index = tl.cumsum(is_own, 0) - 1
    replica_index = own + tl.cumsum(is_replica, 0) - 1  # masked lanes come last
    index = tl.where(is_own > 0, own_index, replica_index)
    tl.store(out + index, slot - own * is_replica, mask=i < P)


def split_order_in_triton(order_P: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """`kernels.routing.plan.split_order` on CUDA."""
    P, split_P = len(order_P), torch.empty_like(order_P)
    if P:
        slots = triton.next_power_of_2(P)
        split_order_kernel[(1,)](order_P, split_P, P, own, SLOTS=slots, num_warps=1)
    return split_P[:own], split_P[own:]
