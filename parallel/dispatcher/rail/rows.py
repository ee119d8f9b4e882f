"""Rows over a rail, with gradients: tokens to the nodes of their experts, sums of nodes back.

Both directions send the same blocks (`kernels.routing.rail_blocks`), so that only the first of four
exchanges in both passes sends routing.

Legend: T tokens of a rank, D hidden, K expert ids of a token, M nodes, B rows of the blocks of all
nodes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.routing.rail_blocks import RailBlocks, pack_rows, sum_rows
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows
from phalanx.parallel.dispatcher.rail.collective import Rail, RowCounts


class SentBlocks(NamedTuple):
    """Blocks of a rank whose routing has been exchanged."""

    row_TM: Tensor
    """Row of each token in the block of each node, as in `RailBlocks`."""
    token_B: Tensor
    """Token of each row, as in `RailBlocks`."""
    idx_BK: Tensor
    """int32, ids of this node's experts, of the rows that arrive; -1 for others."""
    bits_BK: Tensor
    """int32, bits of their probabilities."""
    counts: RowCounts | None
    """Rows that hold data; None if the rail sends all."""


def send_routing(rail: Rail, blocks: RailBlocks) -> SentBlocks:
    """Send routing to the nodes of the experts."""
    # One small collective instead of two: latency, not bytes, is what the routing costs.
    routing_B2K = rail.swap(blocks.routing_B2K)
    idx_BK, bits_BK = routing_B2K[:, 0].contiguous(), routing_B2K[:, 1].contiguous()
    counts = None
    if rail.counts:
        used_B = (idx_BK >= 0).any(1)
        arriving_M = used_B.view(len(blocks.needed_M), -1).sum(1, dtype=torch.int32)
        counts = RowCounts(blocks.needed_M, arriving_M)
    return SentBlocks(blocks.row_TM, blocks.token_B, idx_BK, bits_BK, counts)


def send_over(
    rail: Rail, x_TD: Tensor, prob_TK: Tensor, blocks: SentBlocks, fp8: FP8Rows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Send tokens to the nodes of their experts.

    Args:
        rail: the rail.
        x_TD: tokens.
        prob_TK: fp32 probabilities, which have been sent; their gradient returns here.
        blocks: blocks of these tokens.
        fp8: format in which the rows travel; None: they travel as they are.

    Returns:
        Rows of the tokens that other ranks sent, [B, D], or without data if they are in `fp8`;
        their ids of this node's experts, int32 [B, K], and probabilities, fp32 [B, K]. Gradients
        of rows and probabilities return to the tokens' ranks and are summed there in fp32.
    """
    rows_BD, prob_BK = _Send.apply(x_TD, prob_TK, blocks, rail, fp8)
    return rows_BD, blocks.idx_BK, prob_BK


def collect_over(
    rail: Rail,
    sums_BD: Tensor,
    blocks: SentBlocks,
    addends: Sequence[Tensor] = (),
    fp8: FP8Rows | None = None,
) -> Tensor:
    """Return sums of this node to the ranks of their tokens: [T, D].

    They are summed there in fp32 in the order of nodes, with addends [T, D]. The gradient travels
    in `fp8`, if it is given.
    """
    return _Collect.apply(sums_BD, blocks, rail, fp8, *addends)


class _Send(torch.autograd.Function):
    """Tokens to nodes; backward, sums of gradients of tokens and probabilities over nodes."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        prob_TK: Tensor,
        blocks: SentBlocks,
        rail: Rail,
        fp8: FP8Rows | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.blocks, ctx.rail = blocks, rail
        return _bring(x_TD, blocks, rail, fp8), blocks.bits_BK.view(torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: Tensor, grad_BK: Tensor) -> tuple[Tensor | None, ...]:
        # needs_input_grad is the same on all ranks, hence so is the sequence of collectives.
        grad_TD, grad_TK = (
            _sums(grad, ctx.blocks, ctx.rail) if needed else None
            for grad, needed in zip((grad_BD, grad_BK), ctx.needs_input_grad, strict=False)
        )
        return grad_TD, grad_TK, None, None, None


class _Collect(torch.autograd.Function):
    """Sums over nodes at the tokens' ranks, with addends; backward, gradients to the nodes."""

    @staticmethod
    def forward(
        ctx: Any,
        sums_BD: Tensor,
        blocks: SentBlocks,
        rail: Rail,
        fp8: FP8Rows | None,
        *addends: Tensor,
    ) -> Tensor:
        ctx.blocks, ctx.rail, ctx.fp8, ctx.addends = blocks, rail, fp8, len(addends)
        return _sums(sums_BD, blocks, rail, addends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        fp8: FP8Rows | None = ctx.fp8
        grad_BD = _bring(grad_TD, ctx.blocks, ctx.rail, fp8, gradient=True)
        return grad_BD, None, None, None, *[grad_TD] * ctx.addends


def _sums(
    rows_BD: Tensor, blocks: SentBlocks, rail: Rail, addends: Sequence[Tensor] = ()
) -> Tensor:
    """Rows return to the ranks of their tokens, where they are added: [T, ...]."""
    back = blocks.counts and blocks.counts.back
    return sum_rows(rail.swap(rows_BD, back), blocks.row_TM, addends)


def _bring(
    x_TD: Tensor, blocks: SentBlocks, rail: Rail, fp8: FP8Rows | None, *, gradient: bool = False
) -> Tensor:
    """Rows of tokens, or of a gradient, to the nodes of the tokens' experts: [B, D]."""

    def move(rows: Tensor) -> Tensor:
        return rail.swap(pack_rows(rows, blocks.token_B), blocks.counts)

    if fp8 is None:
        return move(x_TD)
    bring = fp8.bring_gradient if gradient else fp8.bring_tokens
    return bring(x_TD, move)
