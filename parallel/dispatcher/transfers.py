"""The transfers of one call of an MoE layer over `symm`, and the autograd functions that run them.

A call has four functions, each of which starts a transfer in one pass and ends one in the other:

                Dispatch        Receive        (experts)    SendBack       Collect
    forward     starts tokens   waits for them              starts sums    waits for them, adds
    backward    waits, adds     starts their                waits for      starts gradients
                                gradients                   them           of sums

Where transfers overlap the experts' kernels (`MoETransfers.overlaps`), the experts start and wait
for some of them instead.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T received rows, S
expert rows, F expert width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.elementwise.block_sum import block_sum
from phalanx.kernels.expert_mlp.backend import Rows, tensors_of
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.quantize.packed import row_bytes
from phalanx.kernels.routing.wire import pack_routing, routing_size, unpack_routing
from phalanx.kernels.sm90.exchange.peer_buffers import padded, unpadded
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows, without_data
from phalanx.parallel.dispatcher.in_flight import InFlight

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.combine_push import UnreducedRows
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer
    from phalanx.kernels.sm90.exchange.tile_progress import TileSignal


class MoETransfers:
    """The transfers of one call of a layer: tokens, sums, and their gradients.

    With `overlaps` it is the `kernels.expert_mlp.autograd.Overlap` of the experts.

    Args:
        exchange: exchange of the group.
        idx_TK: expert ids of this rank's tokens.
        local: number of experts of a rank.
        overlaps: True if the experts' kernels overlap the pushes.
        keep: True if received tokens are copied for the backward pass, not resent.
        fp8: format in which tokens and gradients of sums travel. Without overlap tokens are saved.
    """

    def __init__(
        self,
        exchange: "Exchange",
        idx_TK: Tensor,
        local: int,
        *,
        overlaps: bool,
        keep: bool,
        fp8: FP8Rows | None = None,
    ) -> None:
        self.exchange, self.idx_TK, self.local = exchange, idx_TK, local
        self.overlaps, self.keep, self.fp8 = overlaps, keep, fp8
        self.tokens_out = InFlight(exchange)
        """Tokens to their experts' ranks, in the forward pass and resent in the backward."""
        self.sums_back = InFlight(exchange)
        """Sums of expert rows to their tokens' ranks."""
        self.sum_grads_out = InFlight(exchange)
        """Gradients of sums to the experts' ranks."""
        self.token_grads_back = InFlight(exchange)
        """Gradients of tokens, with those of probabilities as side data, to the tokens' ranks."""
        self.sums_TR: Tensor
        """Received row of each sum of a token, [T, R]."""
        self.table_TK = idx_TK
        """Expert ids that determine the destination ranks of this rank's tokens."""
        self.idx_NK: Tensor
        """Expert ids of received rows."""
        self.saved_tokens: Tensor
        """Tokens for the backward pass: the sent ones, to be resent, or the received ones."""
        self.hidden: int
        """D."""
        self._fc2: tuple[TileSignal, ExpertPlan, torch.cuda.Event]
        self._send_rest: Callable[[], None]

    @property
    def count(self) -> int:
        """N."""
        return self.exchange.ranks * len(self.idx_TK)

    def send_out(self, rows_TD: Tensor, side: Tensor | None = None, *, all_sms: bool) -> "Transfer":
        """Push rows of tokens to their experts' ranks."""
        side = rows_TD.new_empty(0) if side is None else side
        return self.exchange.start(rows_TD, self.table_TK, side, self.local, all_sms=all_sms)

    def send_back(self, rows_ND: Tensor, side: Tensor, *, all_sms: bool) -> "Transfer":
        """Push received rows, or the experts' output for them, to their tokens' ranks."""
        return self.exchange.start(
            rows_ND, self.idx_NK, side, self.local, back=True, all_sms=all_sms
        )

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

    # --- overridden with expert replication (`parallel.dispatcher.replication.transfers`) ---------

    def route(self, prob_TK: Tensor) -> Tensor | None:
        """Pack the routing that travels as side data of the tokens; None if it has travelled."""
        side, self.sums_TR = pack_routing(
            self.idx_TK, prob_TK.contiguous(), ranks=self.exchange.ranks, local=self.local
        )
        return side

    def routing(self, transfer: "Transfer") -> tuple[Tensor, Tensor]:
        """Expert ids and probabilities of received rows, int32 and fp32 [N, K]."""
        T, K = self.idx_TK.shape
        self.idx_NK, prob_NK = unpack_routing(self.side(transfer, routing_size(T, K)), T, K)
        return self.idx_NK, prob_NK

    def collect(self, transfer: "Transfer", addends: Sequence[Tensor] = ()) -> Tensor:
        """Received sums, added in the order of ranks, and addends: [T, D]."""
        from phalanx.kernels.sm90.experts.combine import combine

        return combine(self.rows(transfer), self.sums_TR, addends=addends)

    def packed_tokens(self, transfer: "Transfer", like_ND: Tensor) -> Tensor:
        """Register FP8 tokens, or with overlap their buffer: [N, D] without data."""
        assert self.fp8 is not None
        packed = self.packed_rows(transfer)
        # Other exchanges take the receive buffer before the backward pass.
        return self.fp8.tokens_arrived(packed if self.overlaps else packed.clone(), like_ND)

    def for_experts(self, rows: Tensor) -> Tensor:
        """Received rows [N, ...] in the experts' order, without overlap."""
        return rows

    def saved(self, rows: Tensor) -> Tensor | None:
        """Tensor that the experts save for the backward pass; None: the rows are resent."""
        return rows.clone() if self.keep else None

    @property
    def summed(self) -> int:
        """Number of experts whose rows are sent as sums."""
        return self.local

    def sums(self, plan: ExpertPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Received rows of these experts' rows, expert rows of received rows, and offsets."""
        assert plan.row_index_S is not None and plan.inverse_NK is not None
        return plan.row_index_S, plan.inverse_NK, plan.offsets

    @property
    def unreduced_rows(self) -> "UnreducedRows | None":
        """Expert rows that are sent one by one, not as part of a sum; None: there are none."""
        return None

    # --- overlapped with the experts' kernels -----------------------------------------------------

    @property
    def ready(self) -> Tensor:
        """Flags that kernels wait for before they read tokens, or gradients of sums."""
        return self.exchange.ready_words(self.local)

    def wait_rows(self) -> None:
        """Wait for all rows that `ready` covers."""
        (self.sum_grads_out if self.sum_grads_out.started else self.tokens_out).wait_rows()

    def start_sums(self, a_SF: Rows, hidden: int, plan: ExpertPlan, training: bool) -> Any:
        """Prepare fc2 of a_SF, whose sums are sent as it computes them; returns its tile signal."""
        tokens = self.tokens_out.wait()
        if self.keep and training:
            self.saved_tokens = (self.rows if self.fp8 is None else self.packed_rows)(
                tokens
            ).clone()
        y_SD = self.exchange.rows(tokens).new_empty(len(tensors_of(a_SF)[0]), hidden)
        signal = self.exchange.tile_signal(y_SD, a_SF, self.summed)
        self._fc2 = signal, plan, torch.cuda.current_stream().record_event()
        return signal

    def finish_sums(self) -> Tensor:
        """Start to send the sums of fc2, after its launch; returns their receive buffer."""
        signal, plan, before = self._fc2
        sums = *self.sums(plan), before
        transfer, self._send_rest = self.exchange.send_sums(
            signal, *sums, unreduced_rows=self.unreduced_rows
        )
        del self._fc2
        return self.rows(self.sums_back.put(transfer))

    def send_rest(self) -> None:
        """Send the remaining sums when the experts, and the shared expert, have finished."""
        self._send_rest()
        del self._send_rest  # it refers to the output of fc2

    def send_gradient(
        self, dx_SD: Tensor | None, dprob_NK: Tensor | None, plan: ExpertPlan
    ) -> Tensor | None:
        """Send gradients of received tokens and of their probabilities back, if there are any.

        Ends the transfer of the gradient of the sums.
        """
        if self.sum_grads_out.started:
            self.sum_grads_out.wait()
        if dx_SD is None:
            return None
        side = self._side_of(dprob_NK)
        sums = *self.sums(plan), side
        transfer = self.exchange.send_gradient(dx_SD, *sums, unreduced_rows=self.unreduced_rows)
        self.exchange.wait_running(self.token_grads_back.put(transfer))
        return self.rows(transfer)

    def tokens(self) -> Rows:
        """Received tokens, in the backward pass."""
        if self.fp8 is None:
            return self.saved_tokens if self.keep else self.rows(self.tokens_out.wait())
        packed = self.saved_tokens if self.keep else self.packed_rows(self.tokens_out.wait())
        return self.fp8.tokens(packed, self.hidden)

    def tokens_first(self) -> Rows:
        """Received tokens, before the gradient of the sums is read.

        Exchanges are waited for in the order of their starts, so that gradient has arrived too.
        """
        self.sum_grads_out.wait()
        return self.tokens()

    def return_gradient(self, grad_ND: Tensor, grad_NK: Tensor | None) -> None:
        """Start to send gradients of received tokens and probabilities back, unless experts have.

        Raises:
            RuntimeError: received tokens had another reader than the experts.
        """
        back = self.token_grads_back
        if not back.started:
            back.put(self.send_back(grad_ND, self._side_of(grad_NK), all_sms=True))
        elif self.rows(back.get()).data_ptr() != grad_ND.data_ptr():
            raise RuntimeError("received tokens have another reader than the experts")

    def _side_of(self, grad_NK: Tensor | None) -> Tensor:
        if grad_NK is None:
            grad_NK = torch.zeros_like(self.idx_NK, dtype=torch.float32)
        return padded(grad_NK.view(torch.int32).view(self.exchange.ranks, -1))


class Dispatch(torch.autograd.Function):
    """Start to send tokens and routing; backward, wait for their gradients and sum them."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, prob_TK: Tensor, call: MoETransfers) -> Tensor:
        side = call.route(prob_TK)
        call.hidden, fp8 = x_TD.shape[1], call.fp8
        sent = x_TD.detach() if fp8 is None else fp8.pack_tokens(x_TD).view(torch.bfloat16)
        transfer = call.tokens_out.put(call.send_out(sent, side, all_sms=not call.overlaps))
        ctx.call = call
        if call.overlaps or fp8 is None:  # without overlap FP8 rows are saved at their arrival
            call.saved_tokens = sent
        return call.rows(transfer) if fp8 is None else without_data(x_TD, call.count)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        call: MoETransfers = ctx.call
        R, (T, K) = call.exchange.ranks, call.idx_TK.shape
        transfer = call.token_grads_back.wait()
        probs_RTK = call.side(transfer, T * K).view(torch.float32).view(R, T, K)
        return call.collect(transfer), block_sum(probs_RTK), None


class Receive(torch.autograd.Function):
    """Wait for routing, and for rows without overlap; backward, start to send their gradients.

    With overlap the experts' kernels wait for rows, and have started to send the gradients.
    """

    @staticmethod
    def forward(ctx: Any, like_ND: Tensor, call: MoETransfers) -> tuple[Tensor, Tensor, Tensor]:
        tokens = call.tokens_out
        transfer = tokens.wait_side() if call.overlaps else tokens.wait()
        idx_NK, prob_NK = call.routing(transfer)
        ctx.call = call
        ctx.mark_non_differentiable(idx_NK)
        ctx.set_materialize_grads(False)
        rows_ND = call.rows(transfer) if call.fp8 is None else call.packed_tokens(transfer, like_ND)
        return rows_ND, idx_NK, prob_NK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ND: Tensor, _: None, grad_NK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.call.return_gradient(grad_ND, grad_NK)
        return grad_ND, None


class SendBack(torch.autograd.Function):
    """Start to send sums, unless the experts' kernels have; backward, wait for their gradient."""

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, call: MoETransfers, all_sms: bool) -> Tensor:
        ctx.call = call
        if not call.overlaps:
            sums = call.send_back(out_ND, out_ND.new_empty(0), all_sms=all_sms)
            return call.rows(call.sums_back.put(sums))
        sums_ND = call.rows(call.sums_back.get())
        if out_ND.data_ptr() != sums_ND.data_ptr():
            raise RuntimeError("sums of experts have another reader than `combine`")
        return sums_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        call: MoETransfers = ctx.call
        grads = call.sum_grads_out
        transfer = grads.wait_side() if call.overlaps else grads.wait()
        rows = grad_ND if call.fp8 is None else call.packed_rows(transfer)
        rows = rows if call.overlaps else call.for_experts(rows)
        if call.fp8 is not None:
            rows = call.fp8.gradient_arrived(rows, grad_ND)
        if call.overlaps and not call.keep:
            call.tokens_out.put(call.send_out(call.saved_tokens, all_sms=False))
        return rows, None, None


class Collect(torch.autograd.Function):
    """Wait for sums, and add them and addends; backward, start to send their gradient.

    `all_sms`: the gradient may be sent by all SMs, as no other kernel uses it meanwhile.
    """

    @staticmethod
    def forward(
        ctx: Any, sums_ND: Tensor, call: MoETransfers, all_sms: bool, *addends: Tensor
    ) -> Tensor:
        ctx.call, ctx.all_sms, ctx.addends = call, all_sms, len(addends)
        if call.overlaps:
            call.send_rest()
        return call.collect(call.sums_back.wait(), addends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        call: MoETransfers = ctx.call
        all_sms, fp8 = ctx.all_sms and not call.overlaps, call.fp8
        sent = grad_TD if fp8 is None else fp8.pack_gradient(grad_TD).view(torch.bfloat16)
        transfer = call.sum_grads_out.put(call.send_out(sent, all_sms=all_sms))
        grad_ND = call.rows(transfer) if fp8 is None else without_data(grad_TD, call.count)
        return grad_ND, None, None, *[grad_TD] * ctx.addends


@contextmanager
def saving(rows: Tensor, call: MoETransfers) -> Iterator[None]:
    """Context of the experts, whose saved received rows are resent on demand, or copied.

    Other exchanges take the receive buffer before the backward pass.
    """

    def pack(saved: Tensor) -> Tensor | None:
        if saved.data_ptr() != rows.data_ptr() or saved.shape != rows.shape:
            return saved
        return call.saved(saved)

    def unpack(stored: Tensor | None) -> Tensor:
        if stored is not None:
            return stored
        call.tokens_out.put(call.send_out(call.saved_tokens, all_sms=True))
        return call.for_experts(call.rows(call.tokens_out.wait()))

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
