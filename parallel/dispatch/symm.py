"""Transport `symm`: one-sided exchanges between the GPUs of a node, over NVLink.

Tokens are pushed once to each rank that holds one of their experts, sums come back once from each
such rank, and are added in the order of ranks in fp32 (`parallel.dispatch.exchange`). With SMs set
aside for it (`comm_sms`), pushes run beside the experts: their kernels begin with the tokens that
are there and get the other SMs when a push is done, sums leave as soon as a token's last expert is
through, the gradient of the tokens leaves under the weight gradients, and what is still to come
back does so under whatever the caller has to do meanwhile. Results are the same.

Legend: T tokens per rank, D hidden, K slots of a token, R ranks, N = R * T received rows.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.elementwise.block_sum import block_sum
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.refusal import Refusal
from phalanx.kernels.registry import CUTLASS_DSL
from phalanx.kernels.routing.wire import arrived, leaving, routing_size
from phalanx.parallel.dispatch.costs import NOTHING, Costs, Reach
from phalanx.parallel.dispatch.exchange import (
    PIECE,
    SLOTS,
    Exchange,
    Sent,
    SymmOptions,
    exchange_of,
)
from phalanx.parallel.dispatch.received import Beside, Meanwhile, Planner, Received
from phalanx.parallel.dispatch.transport_class import DispatchContext, Dispatcher, Rank

EXPOSED = 0.25
"""Part of an overlapped exchange that a layer waits for, as measured (docs/kernels/log.md)."""


class Symm(Dispatcher):
    """The transport. See `parallel.dispatch` for its contract.

    Args:
        group: expert-parallel, all on one node.
        plan: makes plans of received routing.
        local: experts of a rank.
        options: the rest.
        waits: the experts' kernels can wait for rows (the fused ones).
    """

    no_overlap = None

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: Planner,
        *,
        local: int,
        options: SymmOptions,
        waits: bool = False,
    ) -> None:
        self._group, self._plan, self._local, self._options = group, plan, local, options
        self._waits = waits

    @classmethod
    def build(cls, context: DispatchContext) -> "Symm":
        c = context
        return cls(c.group, c.plan, local=c.local, options=c.options, waits=c.waits)

    @classmethod
    def refuse_dtype(cls, dtype: torch.dtype) -> Refusal:
        return None if dtype == torch.bfloat16 else f"moves bf16, not {dtype}"

    @classmethod
    def refuse_here(cls, dtype: torch.dtype) -> Refusal:
        return refuse_here(dtype)

    @classmethod
    def refuse(cls, ranks: Sequence[Rank]) -> Refusal:
        several = len({rank.host for rank in ranks}) > 1
        against = "the ranks of an expert-parallel group are on several hosts" if several else None
        return super().refuse(ranks) or against

    @classmethod
    def costs(cls, reach: Reach) -> Costs:
        """A token and a sum once for each rank that wants the token."""
        rows = reach.once_a_rank
        return Costs(
            there=rows,
            back=rows,
            again=NOTHING if reach.keep else rows,
            kept=reach.received if reach.keep else 0,
            buffers=SLOTS * reach.received if reach.ranks > 1 else 0,
            exposed=EXPOSED,
        )

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        meanwhile: Meanwhile = None,
    ) -> Received:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        (T, D), K = x_TD.shape, topk_idx_TK.shape[1]
        exchange = exchange_of(self._group, T, D, K, self._options)
        beside = exchange.overlaps and self._waits
        trip = Trip(exchange, topk_idx_TK.contiguous(), self._local, beside, self._options.keep)
        sent_ND = _Send.apply(x_TD, topk_prob_TK, trip)
        if meanwhile is not None:
            meanwhile()
        rows_ND, idx_NK, prob_NK = _Receive.apply(sent_ND, trip)
        plan = self._plan(idx_NK, prob_NK)
        if beside:
            return Received(rows_ND, plan, trip, trip)
        saving = functools.partial(_saving, rows_ND.detach(), trip)
        return Received(rows_ND, plan, None, trip, saving)

    def combine(self, out_ND: Tensor, received: Received, beside: Beside = None) -> Tensor:
        trip: Trip = received.route
        sent_ND = _SendBack.apply(out_ND, trip, beside is None)
        more = None if beside is None else beside().contiguous()
        return _Collect.apply(sent_ND, more, trip)


class Trip:
    """Tokens of one call on their way to experts and back, and their gradients.

    Args:
        exchange: of the group.
        idx_TK: experts of this rank's tokens.
        local: experts of a rank.
        beside: the experts' kernels run beside the pushes: this is their
            `kernels.expert_mlp.autograd.Traffic`.
        keep: received tokens are copied for the backward pass rather than sent again.
    """

    def __init__(
        self, exchange: Exchange, idx_TK: Tensor, local: int, beside: bool, keep: bool
    ) -> None:
        self.exchange, self.idx_TK, self.local = exchange, idx_TK, local
        self.beside, self.keep = beside, keep
        self.sums_TR: Tensor
        """Where a token's sums arrive."""
        self.idx_NK: Tensor
        """Experts of received rows."""
        self.again: Tensor
        """For the backward pass: this rank's tokens, to be sent again, or received ones."""
        self._on_way: dict[str, Sent] = {}
        self._making: tuple[Any, ExpertPlan, torch.cuda.Event]
        self._send_rest: Callable[[], None]

    def send(self, what: str, rows: Tensor, side: Tensor, *, alone: bool, back: bool) -> Sent:
        """Start an exchange; `meet` waits for it."""
        table = self.idx_NK if back else self.idx_TK
        sent = self.exchange.start(rows, table, side, self.local, back=back, alone=alone)
        self._on_way[what] = sent
        return sent

    def begun(self, what: str) -> Sent:
        """An exchange that has not been met."""
        return self._on_way[what]

    def there(self, what: str) -> bool:
        """It has been sent and not been met."""
        return what in self._on_way

    def begin(self, what: str) -> Sent:
        """Wait for the side data of an exchange; kernels wait for its rows from then on."""
        sent = self.begun(what)
        self.exchange.arrive(sent, side_only=True)
        return sent

    def meet(self, what: str) -> Sent:
        """Wait for all of an exchange."""
        sent = self._on_way.pop(what)
        self.exchange.arrive(sent)
        return sent

    def rows(self, sent: Sent) -> Tensor:
        """[N, D], where they arrive."""
        rows_ND = self.exchange.rows(sent)
        return rows_ND.view_as(rows_ND)

    def side(self, sent: Sent, size: int) -> Tensor:
        """Blocks of `size` int32 from all ranks: [R, size]."""
        return _blocks(self.exchange.side(sent), self.exchange.ranks, size)

    # --- beside the experts' kernels --------------------------------------------------------------

    @property
    def ready(self) -> Tensor:
        """What kernels wait for that read rows of tokens, or of the gradient of their sums."""
        return self.exchange.ready(self.local)

    def start_sums(self, a_SF: Tensor, hidden: int, plan: ExpertPlan, training: bool) -> Any:
        """Sums are going to leave as fc2 of a makes them."""
        self.end_tokens(training)
        y_SD = a_SF.new_empty(a_SF.shape[0], hidden)
        told = self.exchange.told(y_SD, a_SF.shape[1], self.local)
        self._making = told, plan, torch.cuda.current_stream().record_event()
        return told

    def finish_sums(self) -> Tensor:
        """Fc2 has been launched."""
        told, plan, begun = self._making
        assert plan.row_index_S is not None and plan.inverse_NK is not None
        how = (plan.row_index_S, plan.inverse_NK, plan.offsets, begun)
        sent, self._send_rest = self.exchange.send_sums(told, *how)
        self._on_way["out"] = sent
        del self._making
        return self.rows(sent)

    def send_rest(self) -> None:
        """Sums that have not left when experts, and what goes on beside their way, are through."""
        self._send_rest()
        del self._send_rest  # which keeps what fc2 has made

    def end_tokens(self, training: bool) -> None:
        """All received tokens have been read; `training`: the backward pass will again."""
        sent = self.meet("x")
        if self.keep and training:
            self.again = self.rows(sent).clone()

    def send_gradient(
        self, dx_SD: Tensor | None, dprob_NK: Tensor | None, plan: ExpertPlan
    ) -> Tensor | None:
        """Gradients of received tokens and of their probabilities go back, if there are any.

        That of the sums is not waited for any more.
        """
        self.meet("dout")
        if dx_SD is None:
            return None
        assert plan.row_index_S is not None and plan.inverse_NK is not None
        of = (plan.row_index_S, plan.inverse_NK, plan.offsets)
        sent = self.exchange.send_gradient(dx_SD, *of, self._side_of(dprob_NK))
        self._on_way["dx"] = sent
        self.exchange.running(sent)
        return self.rows(sent)

    def tokens(self) -> Tensor:
        """Received tokens in the backward pass."""
        return self.again if self.keep else self.rows(self.meet("x"))

    def return_gradient(self, grad_ND: Tensor, grad_NK: Tensor | None) -> None:
        """Gradients of received tokens and probabilities begin to go back, if they have not yet.

        Raises:
            RuntimeError: something else than the experts has read received tokens.
        """
        if not self.there("dx"):
            self.send("dx", grad_ND, self._side_of(grad_NK), alone=True, back=True)
        elif self.rows(self.begun("dx")).data_ptr() != grad_ND.data_ptr():
            raise RuntimeError("received tokens have another reader than the experts")

    def _side_of(self, grad_NK: Tensor | None) -> Tensor:
        if grad_NK is None:
            grad_NK = torch.zeros_like(self.idx_NK, dtype=torch.float32)
        return _padded(grad_NK.view(torch.int32).view(self.exchange.ranks, -1))


class _Send(torch.autograd.Function):
    """Start of the push of tokens and routing; backward, end of their gradients' way, and sum."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, prob_TK: Tensor, trip: Trip) -> Tensor:
        how = dict(ranks=trip.exchange.ranks, local=trip.local)
        side, trip.sums_TR = leaving(trip.idx_TK, prob_TK.contiguous(), **how)
        sent = trip.send("x", x_TD, side, alone=not trip.beside, back=False)
        trip.again, ctx.trip = x_TD.detach(), trip
        return trip.rows(sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        from phalanx.kernels.sm90.experts.combine import combine

        trip: Trip = ctx.trip
        R, (T, K) = trip.exchange.ranks, trip.idx_TK.shape
        sent = trip.meet("dx")
        probs_RTK = trip.side(sent, T * K).view(torch.float32).view(R, T, K)
        return combine(trip.rows(sent), trip.sums_TR), block_sum(probs_RTK), None


class _Receive(torch.autograd.Function):
    """Received routing, and rows, or where kernels wait for them; backward, start of their
    gradients' way, unless the experts' kernels have."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, trip: Trip) -> tuple[Tensor, Tensor, Tensor]:
        T, K = trip.idx_TK.shape
        sent = trip.begin("x") if trip.beside else trip.meet("x")
        trip.idx_NK, prob_NK = arrived(trip.side(sent, routing_size(T, K)), T, K)
        ctx.trip = trip
        ctx.mark_non_differentiable(trip.idx_NK)
        ctx.set_materialize_grads(False)
        return trip.rows(sent), trip.idx_NK, prob_NK

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ND: Tensor, _: None, grad_NK: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.trip.return_gradient(grad_ND, grad_NK)
        return grad_ND, None


class _SendBack(torch.autograd.Function):
    """Start of the sums' way back, unless the experts' kernels have; backward, end of their
    gradient's."""

    @staticmethod
    def forward(ctx: Any, out_ND: Tensor, trip: Trip, alone: bool) -> Tensor:
        ctx.trip = trip
        if not trip.beside:
            sent = trip.send("out", out_ND, out_ND.new_empty(0), alone=alone, back=True)
            return trip.rows(sent)
        where = trip.rows(trip.begun("out"))
        if out_ND.data_ptr() != where.data_ptr():
            raise RuntimeError("sums of experts have another reader than `combine`")
        return where

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        trip: Trip = ctx.trip
        if not trip.beside:
            trip.meet("dout")
            return grad_ND, None, None
        trip.begin("dout")
        if not trip.keep:
            trip.send("x", trip.again, grad_ND.new_empty(0), alone=False, back=False)
        return grad_ND, None, None


class _Collect(torch.autograd.Function):
    """End of the sums' way back, which adds them and more; backward, start of the gradient's."""

    @staticmethod
    def forward(ctx: Any, sent_ND: Tensor, more_TD: Tensor | None, trip: Trip) -> Tensor:
        from phalanx.kernels.sm90.experts.combine import combine

        ctx.trip, ctx.alone = trip, more_TD is None
        if trip.beside:
            trip.send_rest()
        return combine(trip.rows(trip.meet("out")), trip.sums_TR, more_ND=more_TD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        trip: Trip = ctx.trip
        alone = ctx.alone and not trip.beside
        sent = trip.send("dout", grad_TD, grad_TD.new_empty(0), alone=alone, back=False)
        return trip.rows(sent), None if ctx.alone else grad_TD, None


def refuse_here(dtype: torch.dtype) -> Refusal:
    """Why this rank cannot push tokens of a dtype to others of its host.

    What it finds is one rank's word: `parallel.dispatch.transport` asks those of all.
    """
    if not torch.cuda.is_available():
        return "needs CUDA"
    if torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU"
    if against := Symm.refuse_dtype(dtype):
        return against
    if find_spec("nvidia_cutlass_dsl") is None:
        return f"needs the compiler of its kernels: pip install '{CUTLASS_DSL}'"
    here = torch.cuda.current_device()
    others = (d for d in range(torch.cuda.device_count()) if d != here)
    if not all(torch.cuda.can_device_access_peer(here, other) for other in others):
        return "the GPUs of a host cannot write to each other's memory"
    return None


def _padded(blocks_RX: Tensor) -> Tensor:
    """Blocks of int32 as `push` takes them: a multiple of 16 bytes each."""
    lacking = -blocks_RX.shape[1] % (PIECE // 4)
    return torch.nn.functional.pad(blocks_RX, (0, lacking)) if lacking else blocks_RX


def _blocks(side: Tensor, ranks: int, size: int) -> Tensor:
    """What `_padded` blocks of `size` int32 became at the other end: [R, size], contiguous."""
    pitch = PIECE * -(-4 * size // PIECE)
    return side[: ranks * pitch].view(torch.int32).view(ranks, -1)[:, :size].contiguous()


@contextmanager
def _saving(rows_ND: Tensor, trip: Trip) -> Iterator[None]:
    """Context of the experts: received rows that they save are sent again when wanted, or copied.

    Their place is taken by other exchanges before the backward pass.
    """

    def pack(saved: Tensor) -> Tensor | None:
        if saved.data_ptr() != rows_ND.data_ptr() or saved.shape != rows_ND.shape:
            return saved
        return saved.clone() if trip.keep else None

    def unpack(packed: Tensor | None) -> Tensor:
        if packed is not None:
            return packed
        trip.send("x", trip.again, trip.again.new_empty(0), alone=True, back=False)
        return trip.rows(trip.meet("x"))

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
