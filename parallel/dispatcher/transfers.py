"""State of one call of an MoE layer over `symm`, and the autograd functions of its transfers.

A call has four functions, each of which starts a transfer in one pass and ends one in the other:

                Dispatch        Receive        (experts)    SendSums       Collect
    forward     sends tokens    waits for them              sends sums     waits for them, adds
    backward    waits, adds     sends their                 waits for      sends gradients
                                gradients                   them           of sums

Where transfers overlap the experts' kernels (`LayerCall.overlaps`), the experts start and wait for
some of them instead (`parallel.dispatcher.overlap`). Functions call the exchange directly, so that
a push is few frames from the layer.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T received rows, S
expert rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.elementwise.sums import block_sum
from phalanx.kernels.expert_mlp.calls import Rows, tensors_of
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.quantize.quantize import row_bytes
from phalanx.kernels.routing.plan import pack_routing, routing_size, unpack_routing
from phalanx.kernels.sm90.exchange.peer_buffers import padded, unpadded
from phalanx.parallel.dispatcher.exchange import InFlight
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows, without_data

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer


class Phase(Enum):
    """The last transfer that a call has started."""

    TOKENS = "tokens to their experts"
    SUMS = "sums to their tokens"
    SUM_GRADS = "gradients of sums to the experts"
    TOKEN_GRADS = "gradients of tokens to the tokens"


class SentRouting(NamedTuple):
    """Routing of a rank's tokens, as the exchange takes it."""

    table_TK: Tensor  # int32 expert ids, or slots, that determine the destinations of tokens
    side: Tensor  # side data that travels with the tokens; may be empty
    sums_TR: Tensor  # received row of each sum of a token


def sent_routing(idx_TK: Tensor, prob_TK: Tensor, *, ranks: int, local: int) -> SentRouting:
    """Pack the routing of a rank's tokens as side data of these."""
    probs = prob_TK.detach().contiguous()
    return SentRouting(idx_TK, *pack_routing(idx_TK, probs, ranks=ranks, local=local))


class LayerCall:
    """State of one call of a layer.

    Args:
        exchange: returns the exchange of the present pass.
        idx_TK: expert ids of this rank's tokens.
        sent: their routing.
        hidden: D.
        local: number of expert slots of a rank.
        overlaps: True if the experts' kernels overlap the pushes.
        keep: True if received tokens are copied for the backward pass, not resent.
        fp8: format in which tokens and gradients of sums travel.
    """

    def __init__(
        self,
        exchange: "Callable[[], Exchange]",
        idx_TK: Tensor,
        sent: SentRouting,
        *,
        hidden: int,
        local: int,
        overlaps: bool,
        keep: bool,
        fp8: FP8Rows | None = None,
    ) -> None:
        self._exchange, self.idx_TK, self.sent = exchange, idx_TK, sent
        self.hidden, self.local = hidden, local
        self.overlaps, self.keep, self.fp8 = overlaps, keep, fp8
        self.phase = Phase.TOKENS
        self.tokens = InFlight(exchange)
        """Tokens to their experts' ranks, in the forward pass and resent in the backward."""
        self.sums = InFlight(exchange)
        """Sums of expert rows to their tokens' ranks."""
        self.sum_grads = InFlight(exchange)
        """Gradients of sums to the experts' ranks."""
        self.token_grads = InFlight(exchange)
        """Gradients of tokens, with those of probabilities as side data, to the tokens' ranks."""
        self.idx_NK: Tensor | None = None
        """Expert ids, or slots, of received rows, once the routing has arrived."""
        self.saved_tokens: Tensor | None = None
        """Tokens for the backward pass: the sent ones, to be resent, or the received ones."""
        self.send_rest: Callable[[], None] | None = None
        """Function that sends the sums that are left after the experts, with overlap."""

    @property
    def exchange(self) -> "Exchange":
        """Exchange of the present pass."""
        return self._exchange()

    @property
    def count(self) -> int:
        """N."""
        return self.exchange.ranks * len(self.idx_TK)

    def rows(self, transfer: "Transfer") -> Tensor:
        """Receive buffer of a transfer's rows, [N, D]."""
        rows_ND = self.exchange.rows(transfer)
        return rows_ND.view_as(rows_ND)

    def packed_rows(self, transfer: "Transfer") -> Tensor:
        """Receive buffer of packed FP8 rows, uint8 [N, ...], which starts that of bf16 rows."""
        rows_ND = self.exchange.rows(transfer)
        N, D = rows_ND.shape
        return rows_ND.view(torch.uint8).view(-1)[: N * row_bytes(D)].view(N, -1)

    def side(self, transfer: "Transfer", size: int) -> Tensor:
        """Blocks of `size` int32 from all ranks: [R, size]."""
        return unpadded(self.exchange.side(transfer), self.exchange.ranks, size)

    def grad_side(self, grad_NK: Tensor | None) -> Tensor:
        """Gradients of received probabilities as side data; zeros for None."""
        if grad_NK is None:
            assert self.idx_NK is not None
            grad_NK = torch.zeros_like(self.idx_NK, dtype=torch.float32)
        return padded(grad_NK.view(torch.int32).view(self.exchange.ranks, -1))

    # --- steps that a subclass replaces -----------------------------------------------------------

    def receive_routing(self, transfer: "Transfer") -> tuple[Tensor, Tensor]:
        """Expert ids and probabilities of received rows, int32 and fp32 [N, K]."""
        T, K = self.idx_TK.shape
        self.idx_NK, prob_NK = unpack_routing(self.side(transfer, routing_size(T, K)), T, K)
        return self.idx_NK, prob_NK

    def receive_fp8(self, transfer: "Transfer", like_ND: Tensor) -> Tensor:
        """Register FP8 tokens in the receive buffer, or a copy to keep: [N, D] without data."""
        assert self.fp8 is not None
        packed = self.packed_rows(transfer)
        copies = self.keep and not self.overlaps  # with overlap copies are made later
        return self.fp8.tokens_arrived(packed.clone() if copies else packed, like_ND)

    def for_experts(self, rows: Tensor) -> Tensor:
        """Received rows [N, ...] in the experts' order, without overlap."""
        return rows

    def resent_rows(self) -> Rows:
        """Tokens that were sent once more, in the experts' order, without overlap."""
        transfer, fp8 = self.tokens.wait(), self.fp8
        rows = self.for_experts((self.rows if fp8 is None else self.packed_rows)(transfer))
        return rows if fp8 is None else fp8.tokens(rows, self.hidden)

    def saved(self, rows: Tensor) -> Tensor | None:
        """Tensor that the experts save for the backward pass; None: the rows are resent."""
        copied = self.fp8 is not None  # by `receive_fp8`
        return (rows if copied else rows.clone()) if self.keep else None

    def expert_rows(self, plan: ExpertPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Received rows of summed expert rows, expert rows of received rows, and offsets."""
        assert plan.row_index_S is not None and plan.inverse_NK is not None
        return plan.row_index_S, plan.inverse_NK, plan.offsets

    @property
    def summed(self) -> int:
        """Number of experts whose rows are sent as sums."""
        return self.local

    @property
    def send_options(self) -> dict[str, Any]:
        """Further arguments of the exchange where it sums expert rows."""
        return {}

    def send_back(self, rows_ND: Tensor, side: Tensor, *, all_sms: bool) -> "Transfer":
        """Push received rows, or the experts' output for them, to their tokens' ranks."""
        assert self.idx_NK is not None
        return self.exchange.start(
            rows_ND, self.idx_NK, side, self.local, back=True, all_sms=all_sms
        )

    def send_token_grads(self, grad_ND: Tensor, grad_NK: Tensor | None) -> None:
        """Start to send gradients of received tokens and probabilities back, without overlap."""
        self.token_grads.put(self.send_back(grad_ND, self.grad_side(grad_NK), all_sms=True))
        self.phase = Phase.TOKEN_GRADS

    def collect(self, transfer: "Transfer", addends: Sequence[Tensor] = ()) -> Tensor:
        """Received sums, added in the order of ranks, and addends: [T, D]."""
        from phalanx.kernels.sm90.experts.combine import combine

        return combine(self.rows(transfer), self.sent.sums_TR, addends=addends)


class Dispatch(torch.autograd.Function):
    """Start to send tokens and routing; backward, wait for their gradients and sum them."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, prob_TK: Tensor, call: LayerCall) -> Tensor:
        fp8, (table_TK, side, _) = call.fp8, call.sent
        sent = x_TD.detach() if fp8 is None else fp8.pack_tokens(x_TD).view(torch.bfloat16)
        transfer = call.exchange.start(sent, table_TK, side, call.local, all_sms=not call.overlaps)
        call.tokens.put(transfer)
        ctx.call = call
        call.saved_tokens = None if call.keep else sent
        return call.rows(transfer) if fp8 is None else without_data(x_TD, call.count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        R, (T, K) = call.exchange.ranks, call.idx_TK.shape
        transfer = call.token_grads.wait()
        probs_RTK = call.side(transfer, T * K).view(torch.float32).view(R, T, K)
        return call.collect(transfer), block_sum(probs_RTK), None


class Receive(torch.autograd.Function):
    """Wait for routing, and for rows without overlap; backward, start to send their gradients.

    With overlap the experts' kernels wait for rows, and have started to send the gradients.
    """

    @staticmethod
    def forward(ctx: Any, like_ND: Tensor, call: LayerCall) -> tuple[Tensor, Tensor, Tensor]:
        transfer = call.tokens.wait_side() if call.overlaps else call.tokens.wait()
        idx_NK, prob_NK = call.receive_routing(transfer)
        ctx.call = call
        ctx.mark_non_differentiable(idx_NK)
        ctx.set_materialize_grads(False)
        rows_ND = call.rows(transfer) if call.fp8 is None else call.receive_fp8(transfer, like_ND)
        return rows_ND, idx_NK, prob_NK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ND: Tensor, _: None, grad_NK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        if call.phase is not Phase.TOKEN_GRADS:
            call.send_token_grads(grad_ND, grad_NK)
        elif grad_ND is not call.token_grads.rows:
            raise RuntimeError("received tokens have another reader than the experts")
        return grad_ND, None


class SendSums(torch.autograd.Function):
    """Start to send sums, unless the experts' kernels have; backward, wait for their gradient."""

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, call: LayerCall, all_sms: bool) -> Tensor:
        ctx.call = call
        if call.overlaps:
            if out_ND is not call.sums.rows:
                raise RuntimeError("sums of experts have another reader than `combine`")
            return call.rows(call.sums.get())
        transfer = call.send_back(out_ND, out_ND.new_empty(0), all_sms=all_sms)
        call.phase = Phase.SUMS
        return call.rows(call.sums.put(transfer))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        transfer = call.sum_grads.wait_side() if call.overlaps else call.sum_grads.wait()
        rows = grad_ND if call.fp8 is None else call.packed_rows(transfer)
        rows = rows if call.overlaps else call.for_experts(rows)
        if call.fp8 is not None:
            rows = call.fp8.gradient_arrived(rows, grad_ND)
        if call.overlaps and not call.keep:
            resend(call, all_sms=False)
        return rows, None, None


class Collect(torch.autograd.Function):
    """Wait for sums, and add them and addends; backward, start to send their gradient.

    `all_sms`: the gradient may be sent by all SMs, as no other kernel uses it meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any, sums_ND: Tensor, call: LayerCall, all_sms: bool, *addends: Tensor
    ) -> Tensor:
        ctx.call, ctx.all_sms, ctx.addends = call, all_sms, len(addends)
        if call.send_rest is not None:
            call.send_rest()
            call.send_rest = None  # it refers to the output of fc2
        return call.collect(call.sums.wait(), addends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        call: LayerCall = ctx.call
        fp8, all_sms = call.fp8, ctx.all_sms and not call.overlaps
        sent = grad_TD if fp8 is None else fp8.pack_gradient(grad_TD).view(torch.bfloat16)
        transfer = call.exchange.start(
            sent, call.sent.table_TK, sent.new_empty(0), call.local, all_sms=all_sms
        )
        call.sum_grads.put(transfer)
        call.phase = Phase.SUM_GRADS
        grad_ND = call.rows(transfer) if fp8 is None else without_data(grad_TD, call.count)
        return grad_ND, None, None, *[grad_TD] * ctx.addends


def resend(call: LayerCall, *, all_sms: bool) -> None:
    """Start to send this rank's tokens once more, in the backward pass."""
    tokens = call.saved_tokens
    assert tokens is not None
    side, table_TK = tokens.new_empty(0), call.sent.table_TK
    call.tokens.put(call.exchange.start(tokens, table_TK, side, call.local, all_sms=all_sms))


@contextmanager
def saving(rows: Rows, call: LayerCall) -> Iterator[None]:
    """Context of the experts, whose saved received rows are resent on demand, or copied.

    Other exchanges take the receive buffer before the backward pass. Hooks of autograd get other
    tensor objects than were saved, so that rows are known by their storage and their place in it,
    not by their address. `rows` keeps the storage alive, so that no other tensor can have it.
    """
    parts, again = tensors_of(rows), list[Tensor]()

    def pack(saved: Tensor) -> Tensor | int:
        for number, part in enumerate(parts):
            if saved.is_set_to(part):
                return number if (kept := call.saved(saved)) is None else kept
        return saved

    def unpack(stored: Tensor | int) -> Tensor:
        if isinstance(stored, Tensor):
            return stored
        if stored == 0:  # of FP8 rows values are asked for before scales
            resend(call, all_sms=True)
            again[:] = tensors_of(call.resent_rows())
        return again[stored]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
