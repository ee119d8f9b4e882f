"""Blocks of rows between nodes: a token's row once for each node that holds one of its experts.

A rank sends one block of C rows to each node, its own included. A block has the node's tokens in
their order, and then empty rows: an empty row has token -1 and expert ids -1, its data are
undefined. C is static, and no host reads how many rows a block needs. Rows in excess are left out,
which `needed` tells. Triton kernels on a GPU; torch elsewhere, with the same bits.

Legend: T tokens of a rank, K expert ids of a token, D columns, M nodes, C rows of a block, B = M *
C rows of all blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.elementwise.sums import block_sum


class RailBlocks(NamedTuple):
    """Tokens of a rank's blocks."""

    token_B: Tensor  # int32, token of each row; -1 for an empty row
    row_TM: Tensor  # int32, row of each token in the block of each node; -1 where it has none
    routing_B2K: Tensor
    """int32, ids of the row's experts, counted from the node's first, -1 for others; and the bits
    of their probabilities."""
    needed: Tensor  # int32 scalar, number of rows that the largest block needs


@torch.no_grad()
def plan_blocks(
    idx_TK: Tensor, prob_TK: Tensor, *, nodes: int, experts: int, rows: int
) -> RailBlocks:
    """Assign the tokens of a rank to rows of its blocks: `nodes` M, of `experts` each, `rows` C.

    `idx_TK` are int32 expert ids; those of no expert, such as -1, go to no node. `prob_TK` is fp32.
    """
    if idx_TK.is_cuda:
        from phalanx.extras.between_nodes.rail_blocks_triton import plan_blocks_in_triton

        return RailBlocks(*plan_blocks_in_triton(idx_TK, prob_TK, nodes, experts, rows))
    return plan_blocks_by_sums(idx_TK, prob_TK, nodes, experts, rows)


def plan_blocks_by_sums(
    idx_TK: Tensor, prob_TK: Tensor, nodes: int, experts: int, rows: int
) -> RailBlocks:
    """`plan_blocks` in tensor code."""
    (T, K), device = idx_TK.shape, idx_TK.device
    node_M = torch.arange(nodes, dtype=torch.int32, device=device)
    local_TMK = idx_TK[:, None, :] - (node_M * experts)[:, None]
    local_TMK = torch.where((local_TMK >= 0) & (local_TMK < experts), local_TMK, -1)
    wanted_TM = (local_TMK >= 0).any(2)
    end_TM = wanted_TM.cumsum(0, dtype=torch.int32)
    fits_TM = wanted_TM & (end_TM <= rows)
    row_TM = torch.where(fits_TM, node_M * rows + end_TM - 1, -1)

    B = nodes * rows
    target = torch.where(fits_TM, row_TM, B).flatten().long()  # one extra row takes the others
    token_TM = torch.arange(T, dtype=torch.int32, device=device)[:, None].expand(-1, nodes)
    token_B = row_TM.new_full((B + 1,), -1).scatter_(0, target, token_TM.flatten())[:B]
    bits_TMK = prob_TK.view(torch.int32)[:, None].expand_as(local_TMK)
    routing = torch.stack((local_TMK, bits_TMK), 2).flatten(0, 1)
    empty = torch.tensor([-1, 0], dtype=torch.int32, device=device)[:, None]
    routing_B2K = empty.expand(B + 1, 2, K).clone()
    routing_B2K.index_copy_(0, target, routing)
    needed = wanted_TM.sum(0, dtype=torch.int32).amax()
    return RailBlocks(token_B, row_TM, routing_B2K[:B], needed)


@torch.no_grad()
def pack_rows(x_TD: Tensor, token_B: Tensor) -> Tensor:
    """Copy rows of tokens into blocks: [T, D] -> [B, D], of any dtype; empty rows are undefined."""
    if x_TD.is_cuda:
        from phalanx.extras.between_nodes.rail_blocks_triton import pack_rows_in_triton

        return pack_rows_in_triton(x_TD, token_B)
    return x_TD.index_select(0, token_B.clamp(min=0))


@torch.no_grad()
def sum_rows(rows_BD: Tensor, row_TM: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
    """Sums of each token's rows, one of each node, as `block_sum` of blocks with zeros elsewhere.

    Rows, bf16 or fp32, are summed in fp32 in the order of nodes, with up to two addends [T, D],
    into [T, D] of their dtype.
    """
    if rows_BD.is_cuda:
        from phalanx.extras.between_nodes.rail_blocks_triton import sum_rows_in_triton

        return sum_rows_in_triton(rows_BD, row_TM, addends)
    row_MT = row_TM.T
    sent = rows_BD.index_select(0, row_MT.flatten().clamp(min=0)).unflatten(0, row_MT.shape)
    return block_sum(sent.masked_fill(row_MT[..., None] < 0, 0), addends)
