"""The transfers of a call of an MoE layer over `symm` whose hot experts are replicated.

Those of `parallel.dispatcher.transfers`, and beside them (`Peers`):

    control     exchanges of side data alone: routing, before anything else is sent
    singles     rows that travel by themselves (`kernels.replication.rows`), to memory of their
    token's
                rank; the kernel that sends sums writes them before it raises its flags
    replicas      weights that owners write to slots of other ranks; gradients that owners read
                there. Kernels of memory of their own raise flags when either is there

Tokens and gradients of sums travel in FP8 if those without replication do; rows that come back,
singles too, are bf16 in any case.

Control has buffers and flags of its own, since places of the main exchanges are taken in turn by an
order that has tokens, sums and their gradients alone (`kernels.sm90.exchange.peer_buffers.SLOTS`).
Where pushes run beside the experts it has a stream of its own too: weights that took their turn
after the tokens would come too late for the SMs that these leave, which go to CTAs of fc1 that are
waiting for some, and would then be sent when own experts have finished.

Kernels of one stream follow each other, and a push makes a fence of system scope before it raises
its flags (`kernels.sm90.exchange.push.last_of_all`), which therefore show all that kernels before
it have written, of whatever kind their stores were. Who waits for flags mostly does so in a kernel
of its own (`wait_peers`), so that TMA loads of a later kernel need no fence of proxies. Two kernels
wait by themselves: replicas' first GEMM, which has that fence (`kernels.sm90.exchange.ready`), and
the one that adds gradients, which loads no memory by TMA.

Why each of these memories can be one for all layers, though no flag says that it has been read:
between any two times that rank A writes to memory of rank B, or over what B reads, A waits for an
exchange on the way *out*, of routing in a forward pass and of gradients of sums in a backward pass.
B pushes that exchange after everything that its stream has been given before, which is all that B
has read for the calls before this one:

    singles     B reads them as it collects sums, or gradients of tokens, the last thing of a pass
    weights     B's experts read them before it collects; kept ones are copied before that
    gradients   B adds those in A's room to its own before its experts' backward pass returns; A
                writes to its room again in the next backward pass

A model of this is tests/parallel/dispatcher/replication/protocol.py.

Legend: T tokens per rank, D hidden, K slots of a token, R ranks, N = R * T received rows, S expert
rows, L own experts, G replica slots, P = L + G places of a rank.
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


class UnreducedRows(Protocol):
    """Memory of every rank for rows that travel by themselves."""

    rows_KTD: Tensor
    """Those of this rank's tokens."""

    def sent(self, return_plan: ReturnPlan) -> Any:
        """What the exchange is told of this rank's expert rows, to write them to the ranks of
        their tokens."""


class Peers(NamedTuple):
    """What a call needs beside the main exchange."""

    control: Control
    unreduced_rows: UnreducedRows
    group: dist.ProcessGroup


class ReplicatedTransfers(MoETransfers):
    """The transfers of one call.

    Args:
        exchange: of tokens and sums.
        peers: the rest.
        idx_TK: experts of this rank's tokens.
        local: L.
        clones: how many, and what they cost.
        planner: makes the plan of clones.
        overlaps, keep, fp8: as of `MoETransfers`.
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
        places = local + options.slots
        super().__init__(exchange, idx_TK, places, overlaps=overlaps, keep=keep, fp8=fp8)
        self.home = ExpertOwner(peers.group.rank(), local, self.local)
        self.control = peers.control
        self.replication: ReplicationPlan
        """Of the micro-batch."""
        self._singles, self._planner = peers.unreduced_rows, planner
        self._size = options.size(exchange.ranks)
        self._routing: tuple[Tensor, Tensor]
        self._packed: Tensor
        """Received tokens in FP8, before their order is known."""
        self._parting: ReturnPlan
        self._rows: tuple[Tensor, Tensor]
        """Received rows of expert rows, and offsets. Not the plan, which leads back to this."""
        self._dx_SD: Tensor

    def route(self, prob_TK: Tensor) -> Tensor | None:
        """Routing of all ranks, of which every rank makes the same plan; tokens go by places."""
        (T, K), ranks, local = self.idx_TK.shape, self.exchange.ranks, self.home.local
        side, self.sums_TR = pack_routing(
            self.idx_TK, prob_TK.contiguous(), ranks=ranks, local=local
        )
        transfer = self.control.send(side)
        self.control.wait(transfer)
        blocks = self.control.side(transfer, routing_size(T, K))
        experts_NK, prob_NK = unpack_routing(blocks, T, K)
        placed = self._planner.route_to_replicas(experts_NK, ranks * local, self._size)
        self.replication, self.idx_NK = placed
        self._routing = experts_NK, prob_NK
        self.table_TK = self.idx_NK.narrow(0, self.home.rank * T, T)
        return None

    def routing(self, transfer: "Transfer") -> tuple[Tensor, Tensor]:
        """Places of all ranks' pairs, and their probabilities."""
        return self.idx_NK, self._routing[1]

    def planned(self, plan: ExpertPlan) -> None:
        """Note the plan of places, and how its rows are going to travel back."""
        assert plan.row_index_S is not None and plan.inverse_NK is not None
        self._rows = plan.row_index_S, plan.offsets
        given = self._routing[0], self.idx_NK, plan.inverse_NK
        self._parting = split_returns(*given, len(plan.row_index_S), self.home)
        del self._routing

    def packed_tokens(self, transfer: "Transfer", like_ND: Tensor) -> Tensor:
        """Where nothing overlaps `in_order` copies them from their place."""
        if self.overlaps:
            return super().packed_tokens(transfer, like_ND)
        self._packed = self.packed_rows(transfer)
        return without_data(like_ND, self.count)

    def for_experts(self, rows: Tensor) -> Tensor:
        """Rows in the order of experts, who give theirs back in that order too."""
        return gather_rows(rows, *self._rows)

    def in_order(self, rows_ND: Tensor) -> Tensor:
        """Received tokens in that order; without data if they have come in FP8."""
        if self.fp8 is None:
            return self.for_experts(rows_ND)
        packed = self.for_experts(self._packed)
        del self._packed
        return self.fp8.tokens_came(packed, rows_ND)

    def saved(self, rows: Tensor) -> Tensor | None:
        """Rows in the order of experts have no place that others take."""
        return rows if self.keep else None

    def send_back(self, rows_ND: Tensor, side: Tensor, *, all_sms: bool) -> "Transfer":
        """Push expert rows [S, D]: some by themselves, then sums, which are made on the way."""
        given = rows_ND.contiguous(), *self._sums, side
        return self.exchange.send_gradient(
            *given, all_sms=all_sms, unreduced_rows=self.unreduced_rows
        )

    def collect(self, transfer: "Transfer", addends: Any = ()) -> Tensor:
        """As without replication, once rows that came by themselves are sums like the others."""
        of = self._singles.rows_KTD, self.idx_TK, self.table_TK
        sum_unreduced_rows(*of, self.rows(transfer), self.home)
        return super().collect(transfer, addends)

    def return_gradient(self, grad_ND: Tensor, grad_NK: Tensor | None) -> None:
        if not self.overlaps:
            grad_ND = self._dx_SD
            del self._dx_SD
        super().return_gradient(grad_ND, grad_NK)

    def put_gradient(self, grad_SD: Tensor) -> Tensor:
        """Keep the gradient of expert rows until that of probabilities goes with it. Returns a
        tensor without data in its place."""
        self._dx_SD = grad_SD
        return without_data(grad_SD, self.count)

    # --- overlapped with the experts' kernels -----------------------------------------------------

    @property
    def summed(self) -> int:
        """All own experts: rows of theirs that go by themselves are no part of a sum."""
        return self.home.local

    def sums(self, plan: ExpertPlan) -> tuple[Tensor, Tensor, Tensor]:
        return self._sums

    @property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        index_S, offsets = self._rows
        return index_S, self._parting.sums_NK, offsets[: self.summed + 1]

    @property
    def unreduced_rows(self) -> Any:
        return self._singles.sent(self._parting)


class InOrder(torch.autograd.Function):
    """Received rows in the order of experts, where nothing overlaps; their gradient waits for that
    of probabilities."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, call: ReplicatedTransfers) -> Tensor:
        ctx.call = call
        return call.in_order(rows_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None]:
        call: ReplicatedTransfers = ctx.call
        return call.put_gradient(grad_SD), None
