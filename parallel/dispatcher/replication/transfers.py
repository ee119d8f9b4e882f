"""The transfers of a call of an MoE layer over `symm` with expert replication.

To the transfers of `parallel.dispatcher.transfers` it adds (`Peers`):

    control          exchanges of side data alone: routing, before anything else is sent
    unreduced rows   rows sent one by one (`kernels.replication.rows`), to memory of their token's
                     rank; the kernel that sends sums writes them before it raises its flags
    replicas         weights that owners write to slots of other ranks; gradients that owners read
                     there. Kernels raise flags, in memory of their own, when either is complete

Tokens and gradients of sums travel in FP8 if they do without replication; rows that come back,
unreduced ones too, are always bf16.

Control has its own buffers and flags, since buffers of the main exchanges are taken in turn in an
order of tokens, sums and their gradients alone (`kernels.sm90.exchange.peer_buffers.SLOTS`). Where
pushes overlap the experts it has its own stream too: weights sent in turn after the tokens would
come too late for the SMs that these leave, which go to CTAs of fc1 that wait for tokens, and would
then be sent after the own experts have finished.

Kernels of one stream follow each other, and a push makes a fence of system scope before it raises
its flags (`kernels.sm90.exchange.push.last_of_all`), which therefore cover all writes of the
kernels before it, whatever the kind of their stores. Most waits for flags are kernels of their own
(`wait_peers`), so that TMA loads of a later kernel need no fence of proxies. Two kernels wait
themselves: the replicas' first GEMM, which has that fence (`kernels.sm90.exchange.ready`), and the
kernel that adds gradients, which loads no memory by TMA.

Each of these memories is shared by all layers, without a flag that says that it has been read,
because between any two times that rank A writes to memory of rank B, or over memory that B reads, A
waits for an exchange on the way *out*: of routing in a forward pass, of gradients of sums in a
backward pass. B pushes that exchange after all earlier work of its stream, which includes all its
reads for the calls before:

    unreduced rows   B reads them as it collects sums, or gradients of tokens, at the end of a pass
    weights          B's experts read them before it collects; saved ones are copied before that
    gradients        B adds those in A's buffer to its own before its experts' backward pass
                     returns; A writes to its buffer again in the next backward pass

tests/parallel/dispatcher/replication/protocol.py is a model of this.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T received rows, S
expert rows, L own experts, G replica slots, P = L + G expert slots of a rank.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.replication.rows import (
    ExpertOwner,
    ReturnPlan,
    split_returns,
    sum_unreduced_rows,
)
from phalanx.kernels.routing.replication_plan import ReplicationPlan
from phalanx.kernels.routing.sort_pairs import gather_rows
from phalanx.kernels.routing.wire import pack_routing, routing_size, unpack_routing
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows, without_data
from phalanx.parallel.dispatcher.received import Planner
from phalanx.parallel.dispatcher.replication.control import Control
from phalanx.parallel.dispatcher.replication.options import ReplicationOptions
from phalanx.parallel.dispatcher.transfers import MoETransfers

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Exchange, Transfer


class UnreducedRowsMemory(Protocol):
    """Memory of every rank for rows that are sent one by one."""

    rows_KTD: Tensor
    """Rows of this rank's tokens."""

    def sent(self, return_plan: ReturnPlan) -> Any:
        """Arguments for an exchange that writes expert rows to their tokens' ranks."""


class Peers(NamedTuple):
    """Resources of a call beyond the main exchange."""

    control: Control
    unreduced_rows: UnreducedRowsMemory
    group: dist.ProcessGroup


class ReplicatedTransfers(MoETransfers):
    """The transfers of one call with expert replication.

    Args:
        exchange: exchange of tokens and sums.
        peers: resources beyond the exchange.
        idx_TK: expert ids of this rank's tokens.
        local: L.
        options: options of replication.
        planner: planner of replicas.
        overlaps, keep, fp8: as in `MoETransfers`.
    """

    def __init__(
        self,
        exchange: "Exchange",
        peers: Peers,
        idx_TK: Tensor,
        local: int,
        options: ReplicationOptions,
        planner: Planner,
        *,
        overlaps: bool,
        keep: bool,
        fp8: FP8Rows | None = None,
    ) -> None:
        local_slots = local + options.slots
        super().__init__(exchange, idx_TK, local_slots, overlaps=overlaps, keep=keep, fp8=fp8)
        self.owner = ExpertOwner(peers.group.rank(), local, self.local)
        self.control = peers.control
        self.replication: ReplicationPlan
        """Plan of the micro-batch."""
        self._unreduced, self._planner = peers.unreduced_rows, planner
        self._size = options.size(exchange.ranks)
        self._routing: tuple[Tensor, Tensor]
        self._packed: Tensor
        """Received tokens in FP8, before their order is known."""
        self._return_plan: ReturnPlan
        self._rows: tuple[Tensor, Tensor]
        """Received rows of expert rows, and offsets. Not the plan, which refers to this object."""
        self._dx_SD: Tensor

    def route(self, prob_TK: Tensor) -> Tensor | None:
        """Exchange the routing, plan replicas, and map expert ids to slots; returns None."""
        (T, K), ranks, local = self.idx_TK.shape, self.exchange.ranks, self.owner.local
        side, self.sums_TR = pack_routing(
            self.idx_TK, prob_TK.contiguous(), ranks=ranks, local=local
        )
        transfer = self.control.send(side)
        self.control.wait(transfer)
        blocks = self.control.side(transfer, routing_size(T, K))
        experts_NK, prob_NK = unpack_routing(blocks, T, K)
        self.replication, self.idx_NK = self._planner.route_to_replicas(
            experts_NK, ranks * local, self._size
        )
        self._routing = experts_NK, prob_NK
        self.table_TK = self.idx_NK.narrow(0, self.owner.rank * T, T)
        return None

    def routing(self, transfer: "Transfer") -> tuple[Tensor, Tensor]:
        """Expert slots of all ranks' pairs, and their probabilities."""
        return self.idx_NK, self._routing[1]

    def planned(self, plan: ExpertPlan) -> None:
        """Store the plan of expert slots, and plan the return of its rows."""
        assert plan.row_index_S is not None and plan.inverse_NK is not None
        self._rows = plan.row_index_S, plan.offsets
        pairs = self._routing[0], self.idx_NK, plan.inverse_NK
        self._return_plan = split_returns(*pairs, len(plan.row_index_S), self.owner)
        del self._routing

    def packed_tokens(self, transfer: "Transfer", like_ND: Tensor) -> Tensor:
        """Register FP8 tokens; without overlap `in_order` copies them from the receive buffer."""
        if self.overlaps:
            return super().packed_tokens(transfer, like_ND)
        self._packed = self.packed_rows(transfer)
        return without_data(like_ND, self.count)

    def for_experts(self, rows: Tensor) -> Tensor:
        """Rows in the experts' order, in which their gradients come too."""
        return gather_rows(rows, *self._rows)

    def in_order(self, rows_ND: Tensor) -> Tensor:
        """Received tokens in the experts' order; without data if they arrived in FP8."""
        if self.fp8 is None:
            return self.for_experts(rows_ND)
        packed = self.for_experts(self._packed)
        del self._packed
        return self.fp8.tokens_arrived(packed, rows_ND)

    def saved(self, rows: Tensor) -> Tensor | None:
        """The rows themselves, if saved: in the experts' order they are not in a shared buffer."""
        return rows if self.keep else None

    def send_back(self, rows_ND: Tensor, side: Tensor, *, all_sms: bool) -> "Transfer":
        """Push expert rows [S, D]: unreduced ones, then sums, which the push computes."""
        rows = rows_ND.contiguous(), *self._sums, side
        return self.exchange.send_gradient(
            *rows, all_sms=all_sms, unreduced_rows=self.unreduced_rows
        )

    def collect(self, transfer: "Transfer", addends: Any = ()) -> Tensor:
        """Sum unreduced rows per owner, then collect as without replication."""
        pairs = self._unreduced.rows_KTD, self.idx_TK, self.table_TK
        sum_unreduced_rows(*pairs, self.rows(transfer), self.owner)
        return super().collect(transfer, addends)

    def return_gradient(self, grad_ND: Tensor, grad_NK: Tensor | None) -> None:
        if not self.overlaps:
            grad_ND = self._dx_SD
            del self._dx_SD
        super().return_gradient(grad_ND, grad_NK)

    def put_gradient(self, grad_SD: Tensor) -> Tensor:
        """Store the gradient of expert rows until that of probabilities is sent with it.

        Returns a tensor without data in its place.
        """
        self._dx_SD = grad_SD
        return without_data(grad_SD, self.count)

    # --- overlapped with the experts' kernels -----------------------------------------------------

    @property
    def summed(self) -> int:
        """Number of own experts: rows of replicas are no part of a sum."""
        return self.owner.local

    def sums(self, plan: ExpertPlan) -> tuple[Tensor, Tensor, Tensor]:
        return self._sums

    @property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        index_S, offsets = self._rows
        return index_S, self._return_plan.sums_NK, offsets[: self.summed + 1]

    @property
    def unreduced_rows(self) -> Any:
        return self._unreduced.sent(self._return_plan)


class InOrder(torch.autograd.Function):
    """Received rows in the experts' order, without overlap; backward stores their gradient."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, call: ReplicatedTransfers) -> Tensor:
        ctx.call = call
        return call.in_order(rows_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        call: ReplicatedTransfers = ctx.call
        return call.put_gradient(grad_SD), None
