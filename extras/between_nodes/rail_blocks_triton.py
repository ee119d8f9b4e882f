"""`extras.between_nodes.rail_blocks` on an NVIDIA GPU, in Triton.

Legend: T tokens of a rank, K expert ids of a token, D columns, M nodes, C rows of a block,
B = M * C rows of all blocks.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 1024  # tokens that a program of `plan_node` reads at a time
_COLUMNS = 2048  # columns of a program that copies or adds rows
_MOST_ADDENDS = 2


@triton.jit
def plan_node(  # type: ignore[no-untyped-def]
    idx,
    bits,
    token,
    row,
    routing,
    counts,
    T,
    C,
    experts,
    M,
    K: tl.constexpr,
    SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Fill the block of one node: a program for each, as a token's row depends on those before."""
    m = tl.program_id(0)
    k = tl.arange(0, SLOTS)
    count = 0
    for start in range(0, T, TOKENS):
        t = start + tl.arange(0, TOKENS)
        at = t[:, None] * K + k[None, :]
        here = (t < T)[:, None] & (k < K)[None, :]
        local = tl.load(idx + at, mask=here, other=-1) - m * experts
        local = tl.where(here & (local >= 0) & (local < experts), local, -1)
        wanted = tl.max((local >= 0).to(tl.int32), axis=1)
        j = count + tl.cumsum(wanted, 0) - wanted
        fits = (wanted > 0) & (j < C)
        b = m * C + j
        tl.store(row + t * M + m, tl.where(fits, b, -1), mask=t < T)
        tl.store(token + b, t, mask=fits)
        there = b[:, None] * (2 * K) + k[None, :]
        stored = fits[:, None] & (k < K)[None, :]
        tl.store(routing + there, local, mask=stored)
        tl.store(routing + there + K, tl.load(bits + at, mask=here, other=0), mask=stored)
        count += tl.sum(wanted, 0)
    tl.store(counts + m, count)
    for start in range(count, C, TOKENS):
        j = start + tl.arange(0, TOKENS)
        b = m * C + j
        tl.store(token + b, -1, mask=j < C)
        there = b[:, None] * (2 * K) + k[None, :]
        empty = (j < C)[:, None] & (k < K)[None, :]
        tl.store(routing + there, -1, mask=empty)
        tl.store(routing + there + K, 0, mask=empty)


@triton.jit
def copy_rows(x, token, out, D, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0)
    t = tl.load(token + b).to(tl.int64)
    if t >= 0:
        d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(out + b.to(tl.int64) * D + d, tl.load(x + t * D + d, mask=d < D), mask=d < D)


@triton.jit
def add_rows(  # type: ignore[no-untyped-def]
    rows,
    row,
    first,
    second,
    out,
    D,
    M: tl.constexpr,
    ADDENDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    t = tl.program_id(0)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for m in tl.static_range(M):
        b = tl.load(row + t * M + m).to(tl.int64)
        columns = tl.where(b >= 0, D, 0)
        sent = tl.load(rows + b * D + d, mask=d < columns, other=0.0).to(tl.float32)
        total = sent if m == 0 else total + sent  # 0 + -0 would be 0
    at = t.to(tl.int64) * D + d
    if ADDENDS > 0:
        total += tl.load(first + at, mask=d < D).to(tl.float32)
    if ADDENDS > 1:
        total += tl.load(second + at, mask=d < D).to(tl.float32)
    tl.store(out + at, total, mask=d < D)


def plan_blocks_in_triton(
    idx_TK: Tensor, prob_TK: Tensor, nodes: int, experts: int, rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rail_blocks.plan_blocks`."""
    (T, K), B = idx_TK.shape, nodes * rows
    idx_TK, bits_TK = idx_TK.contiguous(), prob_TK.contiguous().view(torch.int32)
    token_B, row_TM = idx_TK.new_empty(B), idx_TK.new_empty(T, nodes)
    routing_B2K, needed_M = idx_TK.new_empty(B, 2, K), idx_TK.new_empty(nodes)
    plan_node[(nodes,)](
        idx_TK,
        bits_TK,
        token_B,
        row_TM,
        routing_B2K,
        needed_M,
        T,
        rows,
        experts,
        nodes,
        K=K,
        SLOTS=triton.next_power_of_2(K),
        TOKENS=_TOKENS,
        num_warps=8,
    )
    return token_B, row_TM, routing_B2K, needed_M.amax()


def pack_rows_in_triton(x_TD: Tensor, token_B: Tensor) -> Tensor:
    """`rail_blocks.pack_rows`."""
    B, D = token_B.numel(), x_TD.shape[1]
    out_BD = x_TD.new_empty(B, D)
    if out_BD.numel():
        grid = (B, triton.cdiv(D, _COLUMNS))
        copy_rows[grid](x_TD.contiguous(), token_B, out_BD, D, COLUMNS=_COLUMNS)
    return out_BD


def sum_rows_in_triton(rows_BD: Tensor, row_TM: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
    """`rail_blocks.sum_rows`."""
    if len(addends) > _MOST_ADDENDS:
        raise ValueError(f"at most {_MOST_ADDENDS} addends, not {len(addends)}")
    (T, M), D = row_TM.shape, rows_BD.shape[1]
    out_TD = rows_BD.new_empty(T, D)
    if out_TD.numel():
        pointers = [addend.contiguous() for addend in addends]
        pointers += [out_TD] * (_MOST_ADDENDS - len(pointers))
        constants = dict(M=M, ADDENDS=len(addends), COLUMNS=_COLUMNS)
        grid = (T, triton.cdiv(D, _COLUMNS))
        add_rows[grid](rows_BD.contiguous(), row_TM, *pointers, out_TD, D, **constants)
    return out_TD
