"""Expert replication over dense collectives; `extras.replication.options` has the contract.

It runs everywhere and shows the computation; it is not fast. Every rank has all tokens, as without
replication, and gathers its rows from them. On the way back every row is sent one by one, with one
collective per expert id of a token, where a rank otherwise sends one sum a token.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T received rows, S
expert rows, L own experts, G replica slots, P = L + G expert slots of a rank.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.extras.replication.kernels.experts import ReplicatedExperts
from phalanx.extras.replication.kernels.replication_plan import ReplicationPlan
from phalanx.extras.replication.options import ReplicaCounts, ReplicationOptions, plan_replicas
from phalanx.kernels.elementwise.sums import block_sum
from phalanx.kernels.expert_mlp.expert_plan import gather_rows
from phalanx.kernels.expert_mlp.mlp_spec import Layer, MLPWeights, layer_pair
from phalanx.parallel.dispatcher.alltoall import AllToAll, all_routing, all_rows, sum_to_owner
from phalanx.parallel.dispatcher.collectives import Collectives
from phalanx.parallel.dispatcher.fp8_rows import FP8Rows
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Received


class ReplicatedAllToAll(AllToAll):
    """The transport `alltoall` with expert replication, and a planner of expert slots."""

    load_counts = ReplicaCounts()

    def __init__(self, context: DispatchContext) -> None:
        options = context.transport.replication
        assert isinstance(options, ReplicationOptions)
        super().__init__(context.collectives(context.group), context.plan, context.recipe)
        self._group = context.group
        self._local, self._experts, self._options = context.local, context.experts, options
        self._size = options.size(dist.get_world_size(context.group))

    @classmethod
    def build(cls, context: DispatchContext) -> "ReplicatedAllToAll":
        return cls(context)

    def _start(self, x_TD: Tensor, idx_TK: Tensor, prob_TK: Tensor, fp8: FP8Rows | None) -> Any:
        idx_NK, prob_NK = _Routing.apply(idx_TK, prob_TK, self._ranks)
        replication, slot_NK = plan_replicas(self._plan, idx_NK, self._experts, self._size)
        plan = self._plan(slot_NK, prob_NK)
        assert plan.row_index_S is not None and plan.inverse_NK is not None
        local_slots = self._local + self._options.slots
        slot_TK = slot_NK.chunk(self._size.ranks)[dist.get_rank(self._group)]
        route = _Route(
            self._group,
            self._ranks,
            plan.row_index_S,
            plan.inverse_NK,
            plan.offsets,
            (slot_TK // local_slots).clamp(min=0),
            idx_TK // self._local,
            fp8,
        )
        return _Dispatch.apply(x_TD, route), plan, route, replication

    def receive_tokens(self, sent: Any) -> Received:
        x_SD, plan, route, replication = sent
        return Received(
            x_SD,
            plan._replace(row_index_S=None, inverse_NK=None),
            fp8_inputs=None if route.fp8 is None else route.fp8.fp8_inputs,
            route=route,
            experts=ReplicatedExperts(
                _Replicas(self._group, replication, self._local, self._options.keep)
            ),
            statistics=replication,
        )

    def receive_sums(
        self, sent: Tensor, received: Received, addends: Sequence[Tensor] = ()
    ) -> Tensor:
        return _Combine.apply(sent, received.route, *addends)


class _Route(NamedTuple):
    group: dist.ProcessGroup
    ranks: Collectives  # collectives of the group
    row_index_S: Tensor  # received row of each expert row
    inverse_NK: Tensor  # expert row of all ranks' pairs on this rank, -1 for those of others
    offsets: Tensor
    holder_TK: Tensor  # rank that computes each pair of this rank's tokens; any for the id -1
    owner_TK: Tensor  # rank of the pair's expert; negative for the id -1
    fp8: FP8Rows | None  # format of sent tokens and gradients of sums; None: they are not quantised


def _send(x_TD: Tensor, route: _Route) -> Tensor:
    return gather_rows(all_rows(x_TD, route.ranks), route.row_index_S, route.offsets)


def _combine_rows(y_SD: Tensor, route: _Route, more: tuple[Tensor, ...] = ()) -> Tensor:
    """Sums of each token's rows per owner, rounded, then their sum with addends: [T, D]."""
    R, (T, K) = dist.get_world_size(route.group), route.owner_TK.shape
    ranks_R1 = torch.arange(R, device=y_SD.device)[:, None]
    sums_RTD = y_SD.new_zeros(R, T, y_SD.shape[1], dtype=torch.float32)
    token_T = torch.arange(T, device=y_SD.device)
    for k in range(K):
        row_N = route.inverse_NK[:, k]
        sent_ND = y_SD.index_select(0, row_N.clamp(min=0))
        sent_ND = torch.where(row_N[:, None] >= 0, sent_ND, 0.0)
        received_ND = torch.empty_like(sent_ND)
        dist.all_to_all_single(received_ND, sent_ND, group=route.group)
        row_TD = received_ND.index_select(0, route.holder_TK[:, k] * T + token_T)
        of_owner_RT = route.owner_TK[:, k] == ranks_R1
        sums_RTD += torch.where(of_owner_RT[..., None], row_TD.float(), 0.0)
    return block_sum(sums_RTD.to(y_SD.dtype), more)


class _Routing(torch.autograd.Function):
    """All-gather of routing; backward, the gradient of a pair comes from the rank of its row."""

    @staticmethod
    def forward(
        ctx: Any, idx_TK: Tensor, prob_TK: Tensor, ranks: Collectives
    ) -> tuple[Tensor, Tensor]:
        ctx.ranks = ranks
        idx_NK, prob_NK = all_routing(idx_TK, prob_TK, ranks)
        ctx.mark_non_differentiable(idx_NK)
        return idx_NK, prob_NK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad_NK: Tensor) -> tuple[None, Tensor | None, None]:
        need = ctx.needs_input_grad[1]
        return None, sum_to_owner(grad_NK, ctx.ranks) if need else None, None


class _Dispatch(torch.autograd.Function):
    """Tokens to their expert rows; backward is `_combine_rows`."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, route: _Route) -> Tensor:
        ctx.route, send = route, partial(_send, route=route)
        return send(x_TD) if route.fp8 is None else route.fp8.bring_tokens(x_TD, send)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor | None, None]:
        return _combine_rows(grad_SD, ctx.route) if ctx.needs_input_grad[0] else None, None


class _Combine(torch.autograd.Function):
    """Rows to their tokens, summed, with addends; backward is `_send`."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, route: _Route, *more: Tensor) -> Tensor:
        ctx.route, ctx.addends = route, len(more)
        return _combine_rows(y_SD, route, more)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        route: _Route = ctx.route
        send = partial(_send, route=route)
        grad = send(grad_TD) if route.fp8 is None else route.fp8.bring_gradient(grad_TD, send)
        return grad, None, *[grad_TD] * ctx.addends


class _Replicas:
    """Exchange of replicas by all-to-alls of as many weights as there are slots."""

    def __init__(
        self, group: dist.ProcessGroup, replication: ReplicationPlan, local: int, keep: bool
    ) -> None:
        self._group, self.keep = group, keep
        rank, held_RG = dist.get_rank(group), replication.expert_RN.long()
        self._owner_G = torch.where(held_RG[rank] >= 0, held_RG[rank] // local, -1)
        """Owners of this rank's replicas, -1 for an empty slot."""
        sent_RG = (held_RG >= 0) & (held_RG // local == rank)
        self._sent_RG = sent_RG
        self._own_RG = torch.where(sent_RG, held_RG - rank * local, 0)
        """Own expert in each rank's slots."""

        self._grads: MLPWeights

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        return _each(own, self._send)

    def ready(self, layer: Layer) -> None:
        """None: they arrived with the collective."""

    def wait(self, layer: Layer) -> None:
        """Return at once: they arrived with the collective."""

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        slots = self._own_RG.shape[1]
        self._grads = _each(own, lambda w: w.new_empty(slots, *w.shape[1:], dtype=torch.float32))
        return self._grads

    def send_grads(self, layer: Layer) -> None:
        """Do nothing: `reduce_grads` sends them."""

    def reduce_grads(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        for grad_G, own_L in zip(layer_pair(self._grads, layer), own, strict=True):
            if grad_G is not None and own_L is not None:
                self._reduce(grad_G, own_L)

    def _send(self, own_L: Tensor) -> Tensor:
        ranks, slots = self._own_RG.shape
        sent_RG = own_L.index_select(0, self._own_RG.flatten()).unflatten(0, (ranks, slots))
        received_RG = torch.empty_like(sent_RG)
        dist.all_to_all_single(received_RG, sent_RG, group=self._group)
        index_G = self._owner_G.clamp(min=0) * slots + torch.arange(slots, device=own_L.device)
        return received_RG.flatten(0, 1).index_select(0, index_G)

    def _reduce(self, grad_G: Tensor, own_L: Tensor) -> None:
        ranks, slots = self._own_RG.shape
        rank_R1 = torch.arange(ranks, device=grad_G.device)[:, None]
        shape = (ranks, slots, *[1] * (grad_G.ndim - 1))
        # A slot without a borrower may hold anything, so that it is masked and not multiplied.
        sent_RG = torch.where((self._owner_G == rank_R1).view(shape), grad_G, 0.0)
        received_RG = torch.empty_like(sent_RG)
        dist.all_to_all_single(received_RG, sent_RG, group=self._group)
        received_RG = torch.where(self._sent_RG.view(shape), received_RG, 0.0)
        for borrower in range(ranks):
            for slot in range(slots):
                index_1 = self._own_RG[borrower, slot].view(1)
                sum_1 = own_L.index_select(0, index_1).float() + received_RG[borrower, slot]
                own_L.index_copy_(0, index_1, sum_1.to(own_L.dtype))


def _each(weights: MLPWeights, fn: Callable[[Tensor], Tensor]) -> MLPWeights:
    w1, w2, b1, b2 = weights
    return MLPWeights(
        fn(w1), fn(w2), None if b1 is None else fn(b1), None if b2 is None else fn(b2)
    )
