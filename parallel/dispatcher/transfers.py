"""The transfers of one call of an MoE layer over `symm`, and their places in autograd.

A call is made of four functions, each of which starts a transfer in one pass and ends one in the
other:

                Dispatch        Receive        (experts)    SendBack       Collect
    forward     starts tokens   waits for them              starts sums    waits for them, adds
    backward    waits, adds     starts their                waits for      starts gradients
                                gradients                   them           of sums

Where transfers overlap the experts' kernels (`MoETransfers.overlaps`), the experts start and wait
for some of them instead.

Legend: T tokens per rank, D hidden, K slots of a token, R ranks, N = R * T received rows, S expert
rows, F expert width.
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
        exchange: of the group.
        idx_TK: experts of this rank's tokens.
        local: experts of a rank.
        overlaps: the experts' kernels run beside the pushes.
        keep: received tokens are copied for the backward pass rather than sent again.
        fp8: in which tokens and gradients of sums travel. Without overlap tokens are kept then.
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
        """Tokens to their experts' ranks, in the forward pass and once more in the backward."""
        self.sums_back = InFlight(exchange)
        """Sums of expert rows to their tokens' ranks."""
        self.sum_grads_out = InFlight(exchange)
        """Gradients of sums to the experts' ranks."""
        self.token_grads_back = InFlight(exchange)
        """Gradients of tokens, and as side data of probabilities, to the tokens' ranks."""
        self.sums_TR: Tensor
        """Where a token's sums arrive."""
        self.table_TK = idx_TK
        """What says to which ranks this rank's tokens go."""
        self.idx_NK: Tensor
        """Experts of received rows."""
        self.again: Tensor
        """For the backward pass: this rank's tokens as they were sent, to be sent again, or
        received ones."""
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
        """Push received rows, or what became of them, to their tokens' ranks."""
        how = dict(back=True, all_sms=all_sms)
        return self.exchange.start(rows_ND, self.idx_NK, side, self.local, **how)

    def rows(self, transfer: "Transfer") -> Tensor:
        """[N, D], where they arrive."""
        rows_ND = self.exchange.rows(transfer)
        return rows_ND.view_as(rows_ND)

    def packed_rows(self, transfer: "Transfer") -> Tensor:
        """Packed rows in FP8, uint8 [N, ...], where they arrive: the first of each bf16 row's
        place."""
        rows_ND = self.exchange.rows(transfer)
        N, D = rows_ND.shape
        return rows_ND.view(torch.uint8).view(-1)[: N * row_bytes(D)].view(N, -1)

    def side(self, transfer: "Transfer", size: int) -> Tensor:
        """Blocks of `size` int32 from all ranks: [R, size]."""
        return unpadded(self.exchange.side(transfer), self.exchange.ranks, size)

    # --- overridden with expert replication (`parallel.dispatcher.replication.transfers`) ---------

    def route(self, prob_TK: Tensor) -> Tensor | None:
        """Before tokens leave: routing that goes with them, if any does."""
        how = dict(ranks=self.exchange.ranks, local=self.local)
        side, self.sums_TR = pack_routing(self.idx_TK, prob_TK.contiguous(), **how)
        return side

    def routing(self, transfer: "Transfer") -> tuple[Tensor, Tensor]:
        """int32 and fp32 [N, K]: routing of received rows, for their plan."""
        T, K = self.idx_TK.shape
        self.idx_NK, prob_NK = unpack_routing(self.side(transfer, routing_size(T, K)), T, K)
        return self.idx_NK, prob_NK

    def collect(self, transfer: "Transfer", addends: Sequence[Tensor] = ()) -> Tensor:
        """[T, D]: sums that have come, added up in the order of ranks, and what is added."""
        from phalanx.kernels.sm90.experts.combine import combine

        return combine(self.rows(transfer), self.sums_TR, addends=addends)

    def packed_tokens(self, transfer: "Transfer", like_ND: Tensor) -> Tensor:
        """Received tokens in FP8 are there, or where kernels wait for them: [N, D] without data."""
        assert self.fp8 is not None
        packed = self.packed_rows(transfer)
        # Their place is taken by other exchanges before the backward pass.
        return self.fp8.tokens_came(packed if self.overlaps else packed.clone(), like_ND)

    def for_experts(self, rows: Tensor) -> Tensor:
        """Received rows [N, ...] as the experts take them, where nothing overlaps."""
        return rows

    def saved(self, rows: Tensor) -> Tensor | None:
        """What the experts keep of these for the backward pass; None: they are sent again."""
        return rows.clone() if self.keep else None

    @property
    def summed(self) -> int:
        """Experts whose rows are sent as sums."""
        return self.local

    def sums(self, plan: ExpertPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Of these experts' rows: received rows, expert rows of received rows, and offsets."""
        assert plan.row_index_S is not None and plan.inverse_NK is not None
        return plan.row_index_S, plan.inverse_NK, plan.offsets

    @property
    def unreduced_rows(self) -> "UnreducedRows | None":
        """Expert rows that go by themselves, not as part of a sum."""
        return None

    # --- overlapped with the experts' kernels -----------------------------------------------------

    @property
    def ready(self) -> Tensor:
        """What kernels wait for that read rows of tokens, or of the gradient of their sums."""
        return self.exchange.ready_words(self.local)

    def wait_rows(self) -> None:
        """Wait for all of them."""
        (self.sum_grads_out if self.sum_grads_out.started else self.tokens_out).wait_rows()

    def start_sums(self, a_SF: Rows, hidden: int, plan: ExpertPlan, training: bool) -> Any:
        """Before fc2 of a, whose sums are going to leave as it makes them; its tile signal."""
        tokens = self.tokens_out.wait()
        if self.keep and training:
            self.again = (self.rows if self.fp8 is None else self.packed_rows)(tokens).clone()
        y_SD = self.exchange.rows(tokens).new_empty(len(tensors_of(a_SF)[0]), hidden)
        signal = self.exchange.tile_signal(y_SD, a_SF, self.summed)
        self._fc2 = signal, plan, torch.cuda.current_stream().record_event()
        return signal

    def finish_sums(self) -> Tensor:
        """After the launch of fc2: its sums begin to leave."""
        signal, plan, before = self._fc2
        sums = *self.sums(plan), before
        transfer, self._send_rest = self.exchange.send_sums(
            signal, *sums, unreduced_rows=self.unreduced_rows
        )
        del self._fc2
        return self.rows(self.sums_back.put(transfer))

    def send_rest(self) -> None:
        """Send the sums that are left when the experts, and what runs meanwhile, have finished."""
        self._send_rest()
        del self._send_rest  # which keeps what fc2 has made

    def send_gradient(
        self, dx_SD: Tensor | None, dprob_NK: Tensor | None, plan: ExpertPlan
    ) -> Tensor | None:
        """Gradients of received tokens and of their probabilities go back, if there are any.

        That of the sums is not waited for any more.
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
        """Received tokens in the backward pass."""
        if self.fp8 is None:
            return self.again if self.keep else self.rows(self.tokens_out.wait())
        packed = self.again if self.keep else self.packed_rows(self.tokens_out.wait())
        return self.fp8.tokens(packed, self.hidden)

    def tokens_first(self) -> Rows:
        """The same, before the gradient of the sums is read; that has come as well then, as
        exchanges are waited for in the order of their starts."""
        self.sum_grads_out.wait()
        return self.tokens()

    def return_gradient(self, grad_ND: Tensor, grad_NK: Tensor | None) -> None:
        """Gradients of received tokens and probabilities begin to go back, if they have not yet.

        Raises:
            RuntimeError: something else than the experts has read received tokens.
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
    """Start of tokens and routing; backward, end of their gradients' way, and their sum."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, prob_TK: Tensor, call: MoETransfers) -> Tensor:
        side = call.route(prob_TK)
        call.hidden, fp8 = x_TD.shape[1], call.fp8
        sent = x_TD.detach() if fp8 is None else fp8.pack_tokens(x_TD).view(torch.bfloat16)
        transfer = call.tokens_out.put(call.send_out(sent, side, all_sms=not call.overlaps))
        ctx.call = call
        if call.overlaps or fp8 is None:  # what comes in FP8 is kept where nothing overlaps
            call.again = sent
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
    """Received routing, and rows, or where kernels wait for them; backward, start of their
    gradients' way, unless the experts' kernels have started it."""

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
    """Start of the sums' way back, unless the experts' kernels have started it; backward, end of
    their gradient's."""

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, call: MoETransfers, all_sms: bool) -> Tensor:
        ctx.call = call
        if not call.overlaps:
            sums = call.send_back(out_ND, out_ND.new_empty(0), all_sms=all_sms)
            return call.rows(call.sums_back.put(sums))
        where = call.rows(call.sums_back.get())
        if out_ND.data_ptr() != where.data_ptr():
            raise RuntimeError("sums of experts have another reader than `combine`")
        return where

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        call: MoETransfers = ctx.call
        grads = call.sum_grads_out
        transfer = grads.wait_side() if call.overlaps else grads.wait()
        rows = grad_ND if call.fp8 is None else call.packed_rows(transfer)
        rows = rows if call.overlaps else call.for_experts(rows)
        if call.fp8 is not None:
            rows = call.fp8.gradient_came(rows, grad_ND)
        if call.overlaps and not call.keep:
            call.tokens_out.put(call.send_out(call.again, all_sms=False))
        return rows, None, None


class Collect(torch.autograd.Function):
    """End of the sums' way back, which adds them and more; backward, start of the gradient's.

    `all_sms`: the gradient may take them, as nothing else is made of it meanwhile.
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
    """Context of the experts: received rows that they save are sent again when wanted, or copied.

    Their buffer is taken by other exchanges before the backward pass.
    """

    def pack(saved: Tensor) -> Tensor | None:
        if saved.data_ptr() != rows.data_ptr() or saved.shape != rows.shape:
            return saved
        return call.saved(saved)

    def unpack(stored: Tensor | None) -> Tensor:
        if stored is not None:
            return stored
        call.tokens_out.put(call.send_out(call.again, all_sms=True))
        return call.for_experts(call.rows(call.tokens_out.wait()))

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
