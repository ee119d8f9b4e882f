"""Rows over a rail, with gradients: tokens to the nodes of their experts, sums of nodes back.

A rail connects the ranks with the same local rank on the M nodes of a group. Blocks are of equal,
static size, so that no host needs a count, and a CUDA graph can capture the exchange. Both
directions send the same blocks (`extras.between_nodes.rail_blocks`), so that only the first of four
exchanges in both passes sends routing. Each of two pairs of functions starts an exchange in one
pass and ends one in the other, so that shared experts and weight gradients compute in between:

                send_tokens         receive_tokens      send_sums           receive_sums
    forward     sends tokens        waits for them      sends sums          waits for them, adds
    backward    waits, adds         sends gradients     waits for           sends gradients of
                                    of tokens           gradients of sums   sums

Legend: T tokens of a rank, D hidden, K expert ids of a token, M nodes, C rows of a block, B = M *
C.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.extras.between_nodes.rail_blocks import RailBlocks, pack_rows, sum_rows
from phalanx.kernels import wgrad_queue
from phalanx.parallel.dispatcher.collectives import Collectives
from phalanx.parallel.dispatcher.fp8_rows import RailRows


class Started(NamedTuple):
    """An exchange that has started."""

    received: Tensor  # rows that arrive, [M * C, ...] with block m from node m, after `wait`
    sent: Tensor  # rows that are being sent, referenced until then
    wait: Callable[[], None]  # function that lets the current stream wait for the exchange


class Rail(Protocol):
    """Exchange of blocks between the ranks of a rail."""

    def start(self, blocks: Tensor) -> Started:
        """Start to send block m of M to node m: [M * C, ...]. Collective over the rail."""
        ...


def swap(rail: Rail, blocks: Tensor) -> Tensor:
    """`Rail.start`, for which the current stream waits: [M * C, ...], with block m from node m."""
    started = rail.start(blocks)
    started.wait()
    return started.received


class CollectiveRail:
    """A rail of one even all-to-all of gloo or NCCL, its ranks in the order of nodes."""

    def __init__(self, ranks: Collectives) -> None:
        self._ranks = ranks

    def start(self, blocks: Tensor) -> Started:
        blocks = blocks.contiguous()
        received = torch.empty_like(blocks)

        def exchange(group: dist.ProcessGroup) -> None:
            dist.all_to_all_single(received, blocks, group=group)

        return Started(received, blocks, self._ranks.start(blocks, exchange))


class SentBlocks(NamedTuple):
    """Blocks of a rank whose routing has been exchanged."""

    row_TM: Tensor  # row of each token in the block of each node, as in `RailBlocks`
    token_B: Tensor  # token of each row, as in `RailBlocks`
    idx_BK: Tensor  # int32, ids of this node's experts, of the rows that arrive; -1 for others
    bits_BK: Tensor  # int32, bits of their probabilities


def send_routing(rail: Rail, blocks: RailBlocks) -> SentBlocks:
    """Send routing to the nodes of the experts."""
    # One small collective instead of two: latency, not bytes, is what the routing costs.
    routing_B2K = swap(rail, blocks.routing_B2K)
    idx_BK, bits_BK = routing_B2K[:, 0].contiguous(), routing_B2K[:, 1].contiguous()
    return SentBlocks(blocks.row_TM, blocks.token_B, idx_BK, bits_BK)


class RailCall:
    """State of one call over a rail, for blocks whose routing has been sent.

    `fp8` is the format in which tokens and gradients of sums travel; None: as they are.
    """

    def __init__(self, rail: Rail, blocks: SentBlocks, fp8: RailRows | None = None) -> None:
        self.blocks, self.fp8, self._rail = blocks, fp8, rail
        self._started: list[Started] = []
        self._hidden = False

    def to_nodes(self, rows: Tensor) -> Tensor:
        """Start to send rows of tokens to the nodes of their experts: [B, ...] after `wait`."""
        return self._start(pack_rows(rows, self.blocks.token_B))

    def back(self, rows: Tensor) -> Tensor:
        """Start to send rows back to the ranks of their tokens: [B, ...] after `wait`."""
        return self._start(rows)

    def _start(self, rows: Tensor) -> Tensor:
        self._started.append(self._rail.start(rows))
        return self._started[-1].received

    def hide(self) -> None:
        """Compute weight gradients beside all that was started in this backward pass."""
        wgrad_queue.begin_exchange()
        self._hidden = True

    def wait(self) -> None:
        if self._hidden:
            wgrad_queue.end_exchange()
            self._hidden = False
        for started in self._started:
            started.wait()
        self._started.clear()

    def added(self, rows: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
        """Rows that have come back, added in fp32 in the order of nodes, with addends: [T, ...]."""
        return sum_rows(rows, self.blocks.row_TM, addends)


def send_tokens(call: RailCall, x_TD: Tensor, prob_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Start to send tokens for `receive_tokens`; the gradient of sent `prob_TK` returns here."""
    rows_BD, prob_BK = _SendTokens.apply(x_TD, prob_TK, call)
    return rows_BD, prob_BK


def receive_tokens(call: RailCall, rows_BD: Tensor, prob_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Wait for tokens that other ranks sent, [B, D], and their probabilities, fp32 [B, K].

    Rows are without data if they are in `call.fp8`. Gradients of both return to the tokens' ranks
    and are summed there in fp32.
    """
    rows_BD, prob_BK = _ReceiveTokens.apply(rows_BD, prob_BK, call)
    return rows_BD, prob_BK


def send_sums(call: RailCall, sums_BD: Tensor) -> Tensor:
    """Start to return sums of this node to the ranks of their tokens, for `receive_sums`."""
    return _SendSums.apply(sums_BD, call)


def receive_sums(call: RailCall, sums_BD: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
    """Wait for sums, and add them in fp32 in the order of nodes, with addends [T, D]: [T, D]."""
    return _ReceiveSums.apply(sums_BD, call, *addends)


def _needed(ctx: Any, of: Callable[[Tensor], Tensor], *grads: Tensor) -> list[Tensor | None]:
    pairs = zip(grads, ctx.needs_input_grad, strict=False)
    return [of(grad) if needs else None for grad, needs in pairs]


class _SendTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, prob_TK: Tensor, call: RailCall) -> tuple[Tensor, Tensor]:
        ctx.call = call
        move = call.to_nodes
        rows_BD = move(x_TD) if call.fp8 is None else call.fp8.bring_tokens(x_TD, move)
        prob_BK = call.blocks.bits_BK.view(torch.float32)
        # No gradient travels back that nobody needs.
        needed = zip((rows_BD, prob_BK), ctx.needs_input_grad, strict=False)
        ctx.mark_non_differentiable(*(each for each, needs in needed if not needs))
        return rows_BD, prob_BK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: Tensor, grad_BK: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.wait()
        return *_needed(ctx, ctx.call.added, grad_BD, grad_BK), None


class _ReceiveTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_BD: Tensor, prob_BK: Tensor, call: RailCall
    ) -> tuple[Tensor, Tensor]:
        ctx.call = call
        call.wait()
        return rows_BD.view_as(rows_BD), prob_BK.view_as(prob_BK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: Tensor, grad_BK: Tensor) -> tuple[Tensor | None, ...]:
        # needs_input_grad is the same on all ranks, hence so is the sequence of collectives.
        gradients = _needed(ctx, ctx.call.back, grad_BD, grad_BK)
        ctx.call.hide()
        return *gradients, None


class _SendSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums_BD: Tensor, call: RailCall) -> Tensor:
        ctx.call = call
        return call.back(sums_BD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BD: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.wait()
        return grad_BD, None


class _ReceiveSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums_BD: Tensor, call: RailCall, *addends: Tensor) -> Tensor:
        ctx.call, ctx.addends = call, len(addends)
        call.wait()
        return call.added(sums_BD, addends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        call: RailCall = ctx.call
        move = call.to_nodes
        grad_BD = move(grad_TD) if call.fp8 is None else call.fp8.bring_gradient(grad_TD, move)
        call.hide()
        return grad_BD, None, *[grad_TD] * ctx.addends
