"""The transfers of a call of an MoE layer over `symm` with expert replication.

To the transfers of `parallel.dispatcher.transfers` it adds (`Peers`):

    control          exchanges of side data alone: routing, before anything else is sent
    unreduced rows   rows sent one by one (`extras.replication.kernels.rows`), to memory of their
                     token's rank; the kernel that sends sums writes them before its flags
    replicas         weights that owners write to slots of other ranks; gradients that owners read
                     there. Kernels raise flags, in memory of their own, when either is complete

Tokens and gradients of sums travel in FP8 if they do without replication; rows that come back,
unreduced ones too, are always bf16.

Control has its own buffers and flags, since buffers of the main exchanges are taken in turn in an
order of tokens, sums and their gradients alone (`kernels.sm90.exchange.peer_buffers.SLOTS`). Where
pushes overlap the experts it has its own stream too: weights sent in turn after the tokens would
come too late for the SMs that these leave, which go to CTAs of fc1 that wait for tokens.

Kernels of one stream follow each other, and a push makes a fence of system scope before it raises
its flags (`kernels.sm90.exchange.sender.Sender`), which therefore cover all writes of the
kernels before it. Most waits for flags are kernels of their own (`wait_peers`), so that TMA loads
of a later kernel need no fence of proxies. Two kernels wait themselves: the replicas' first GEMM,
which has that fence (`kernels.sm90.exchange.waves`), and the kernel that adds gradients, which
loads no memory by TMA.

Each of these memories is shared by all layers, without a flag that says that it has been read,
because between any two times that rank A writes to memory of rank B, or over memory that B reads, A
waits for an exchange on the way *out*: of routing in a forward pass, of gradients of sums in a
backward pass. B pushes that exchange after all its reads for the calls before:

    unreduced rows   B reads them as it collects sums, or gradients of tokens, at the end of a pass
    weights          B's experts read them before it collects; saved ones are copied before that
    gradients        B adds those in A's buffer to its own before its experts' backward pass
                     returns; A writes to its buffer again in the next backward pass

tests/extras/replication/protocol.py is a model of this.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T received rows, S
expert rows, L own experts, G replica slots, P = L + G expert slots of a rank.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.extras.replication.kernels.replication_plan import ReplicationPlan
from phalanx.extras.replication.kernels.rows import (
    ExpertOwner,
    ReturnPlan,
    split_returns,
    sum_unreduced_rows,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, gather_rows
from phalanx.kernels.routing.plan import routing_size, unpack_routing
from phalanx.kernels.sm90.exchange.peer_buffers import ExchangeOptions, unpadded
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.exchange import Connection
from phalanx.parallel.dispatcher.fp8_rows import without_data
from phalanx.parallel.dispatcher.transfers import LayerCall, SentRouting

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer

HIDDEN = 8  # columns of the one row, which is never sent: the fewest that an exchange allows


class Control:
    """Exchange of side data alone, as of one token with one expert id, and its stream."""

    def __init__(self, exchange: "Exchange", device: torch.device) -> None:
        self._exchange = exchange
        self._row = torch.zeros(1, HIDDEN, dtype=torch.bfloat16, device=device)
        self._no_expert = torch.full((1, 1), -1, dtype=torch.int32, device=device)

    def send(self, side: Tensor) -> "Transfer":
        return self._exchange.start(self._row, self._no_expert, side, 1, all_sms=True)

    def run_on_comm_stream(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Call `launch` on this exchange's stream; returns a function that waits for it."""
        return self._exchange.run_on_comm_stream(launch)

    def wait(self, transfer: "Transfer") -> None:
        self._exchange.wait(transfer)

    def all_routing(self, side: Tensor, tokens: int, slots: int) -> tuple[Tensor, Tensor]:
        """Exchange packed routing: expert ids and probabilities of all ranks, [N, K]."""
        transfer = self.send(side)
        self.wait(transfer)
        size = routing_size(tokens, slots)
        blocks = unpadded(self._exchange.side(transfer), self._exchange.ranks, size)
        return unpack_routing(blocks, tokens, slots)


class _Connection(Connection):
    def __init__(self, group: dist.ProcessGroup, pairs: int, options: ExchangeOptions) -> None:
        super().__init__(group, 1, HIDDEN, pairs, options)
        device = torch.device("cuda", torch.cuda.current_device())
        self.control = Control(self.exchange, device)

    def release(self) -> None:
        super().release()
        del self.control


def control_of(
    connections: Connections,
    group: dist.ProcessGroup,
    tokens: int,
    hidden: int,
    slots: int,
    options: ExchangeOptions,
) -> Control:
    """The control exchange of a group, with a stream of its own if the main exchange has one."""
    key = ("control", group, tokens, hidden, slots, options)
    return connections.get(key, lambda: _Connection(group, tokens * slots, options)).control


if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer


class UnreducedRowsMemory(Protocol):
    """Memory of every rank for rows that are sent one by one."""

    rows_KTD: Tensor  # rows of this rank's tokens

    def sent(self, return_plan: ReturnPlan) -> Any:
        """Arguments for an exchange that writes expert rows to their tokens' ranks."""


class ReplicatedRouting(NamedTuple):
    """Routing of all ranks, int32 expert ids and the slots that compute these pairs."""

    plan: ReplicationPlan  # plan of the micro-batch
    expert_NK: Tensor  # int32 expert ids of all ranks' tokens
    slot_NK: Tensor  # int32 expert slots that compute these pairs
    prob_NK: Tensor  # fp32 probabilities


class Peers(NamedTuple):
    """Resources of a call beyond the main exchange."""

    control: Control
    unreduced_rows: UnreducedRowsMemory


class ReplicatedCall(LayerCall):
    """State of one call with expert replication, beside that of `LayerCall`.

    Args:
        exchange: returns the exchange of tokens and sums.
        idx_TK: expert ids of this rank's tokens.
        sent: their routing, with slots as destinations.
        owner: owners of experts and slots.
    """

    def __init__(
        self,
        exchange: "Callable[[], Exchange]",
        peers: Peers,
        routing: ReplicatedRouting,
        idx_TK: Tensor,
        sent: SentRouting,
        owner: ExpertOwner,
        **kwargs: Any,
    ) -> None:
        super().__init__(exchange, idx_TK, sent, local=owner.local_slots, **kwargs)
        self.owner, self.control, self.replication = owner, peers.control, routing.plan
        self.idx_NK = routing.slot_NK
        self._routing: ReplicatedRouting | None = routing
        self._unreduced = peers.unreduced_rows
        self._packed: Tensor | None = None  # received tokens in FP8, before their order is known
        self._return_plan: ReturnPlan | None = None
        self._rows: tuple[Tensor, Tensor] | None = None
        """Received rows of expert rows, and offsets. Not the plan, which refers to this object."""
        self._dx_SD: Tensor | None = None

    def plan_returns(self, plan: ExpertPlan) -> None:
        assert plan.row_index_S is not None and plan.inverse_NK is not None
        assert self._routing is not None
        self._rows = plan.row_index_S, plan.offsets
        pairs = self._routing.expert_NK, self._routing.slot_NK, plan.inverse_NK
        self._return_plan = split_returns(*pairs, len(plan.row_index_S), self.owner)
        self._routing = None

    def receive_routing(self, transfer: "Transfer") -> tuple[Tensor, Tensor]:
        assert self._routing is not None
        return self._routing.slot_NK, self._routing.prob_NK

    def receive_fp8(self, transfer: "Transfer", like_ND: Tensor) -> Tensor:
        """Register FP8 tokens; without overlap `in_order` copies them from the receive buffer."""
        if self.overlaps:
            return super().receive_fp8(transfer, like_ND)
        self._packed = self.packed_rows(transfer)
        return without_data(like_ND, self.count)

    def for_experts(self, rows: Tensor) -> Tensor:
        assert self._rows is not None
        return gather_rows(rows, *self._rows)

    def in_order(self, rows_ND: Tensor) -> Tensor:
        """Received tokens in the experts' order; without data if they arrived in FP8."""
        if self.fp8 is None:
            return self.for_experts(rows_ND)
        assert self._packed is not None
        self.saved_tokens = None  # the copy is saved in place of tokens to be resent
        packed, self._packed = self.for_experts(self._packed), None
        return self.fp8.tokens_arrived(packed, rows_ND)

    def saved(self, rows: Tensor) -> Tensor | None:
        """The rows themselves, if saved: in the experts' order they are not in a shared buffer."""
        return rows if self.keep else None

    @property
    def summed(self) -> int:
        """Number of own experts: rows of replicas are no part of a sum."""
        return self.owner.local

    def expert_rows(self, plan: ExpertPlan | None = None) -> tuple[Tensor, Tensor, Tensor]:
        assert self._rows is not None and self._return_plan is not None
        index_S, offsets = self._rows
        return index_S, self._return_plan.sums_NK, offsets[: self.summed + 1]

    @property
    def send_options(self) -> dict[str, Any]:
        assert self._return_plan is not None
        return dict(unreduced_rows=self._unreduced.sent(self._return_plan))

    def send_back(self, rows_ND: Tensor, side: Tensor, *, all_sms: bool) -> "Transfer":
        """Push expert rows [S, D]: unreduced ones, then sums, which the push computes."""
        rows = rows_ND.contiguous(), *self.expert_rows(), side
        return self.exchange.send_gradient(*rows, all_sms=all_sms, **self.send_options)

    def send_token_grads(self, grad_ND: Tensor, grad_NK: Tensor | None) -> None:
        assert self._dx_SD is not None
        grad_SD, self._dx_SD = self._dx_SD, None
        super().send_token_grads(grad_SD, grad_NK)

    def store_gradient(self, grad_SD: Tensor) -> Tensor:
        """Store the gradient until it is sent; returns a tensor without data in its place."""
        self._dx_SD = grad_SD
        return without_data(grad_SD, self.count)

    def collect(self, transfer: "Transfer", addends: Sequence[Tensor] = ()) -> Tensor:
        """Sum unreduced rows per owner, then collect as without replication."""
        pairs = self._unreduced.rows_KTD, self.idx_TK, self.sent.table_TK
        sum_unreduced_rows(*pairs, self.rows(transfer), self.owner)
        return super().collect(transfer, addends)


class InOrder(torch.autograd.Function):
    """Received rows in the experts' order, without overlap; backward stores their gradient."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, call: ReplicatedCall) -> Tensor:
        ctx.call = call
        return call.in_order(rows_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        call: ReplicatedCall = ctx.call
        return call.store_gradient(grad_SD), None
