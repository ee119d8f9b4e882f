"""Transport `hier`: expert-parallel groups over several nodes, each token once to each node.

Ranks with the same local rank exchange over a rail, by collectives of gloo or NCCL: an all-gather
of tokens, whatever their routing, so that no count is needed. Each rank then holds the tokens of
its rail like its own, and sends them to the ranks of its node by the transport inside: `symm` where
that can run, which sends a token only to the ranks that hold one of its experts, or else
`alltoall`. Between nodes a row crosses M - 1 times in each direction, where `alltoall` moves
R - R / M of them.

On the way back a token's expert rows are added by the experts of each rank, these sums over the
ranks of a node in their order, and those over the nodes in their order: each time in fp32, rounded
once to the tokens' dtype. Gradients of tokens take the same path.

The transport inside receives rows in the order of (local rank, node, token), not of ranks. The plan
is computed from routing in the order of ranks, so that expert rows are those of every other
transport, and then names rows by their positions.

With expert replication the transport inside replicates, in each node by itself, where its ranks
have all rows of their experts. Neither weights nor plans pass the network.

Legend: T tokens per rank, D hidden, K expert ids of a token, M nodes, G ranks of each, R = M * G,
A = M * T tokens of a rail, N = R * T received rows, C replica slots of a rank.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.refusal import Refusal
from phalanx.kernels.routing.replication_plan import ReplicationPlan, ReplicationSize
from phalanx.kernels.sm90.exchange.peer_buffers import SLOTS
from phalanx.parallel.dispatcher.alltoall import AllToAll, collect, spread
from phalanx.parallel.dispatcher.costs import NOTHING, GroupTopology, Links, TransportCosts
from phalanx.parallel.dispatcher.fp8_rows import ForwardedRows, RailRows
from phalanx.parallel.dispatcher.nodes import Nodes, refuse
from phalanx.parallel.dispatcher.received import (
    OverlapFn,
    Planner,
    Received,
    SharedExpertFn,
    addends,
)
from phalanx.parallel.dispatcher.symm import EXPOSED, Symm
from phalanx.parallel.dispatcher.transport_class import (
    DispatchContext,
    Dispatcher,
    Rank,
    Transport,
    one_for_all,
)

Inside = Symm | AllToAll
"""Transports inside a node, which forward rows that arrived in FP8."""
_INSIDE: dict[str, type[Inside]] = {"symm": Symm, "alltoall": AllToAll}


class _Route(NamedTuple):
    """`Received.route` of this transport."""

    inside: Any
    """`Received.route` of the transport inside a node."""
    over_rail: RailRows | None
    """Rows of the rail in FP8; None: they travel as they are."""


class Hier(Dispatcher):
    """The transport `hier`; `parallel.dispatcher.base` states the contract.

    Args:
        nodes: nodes of the expert-parallel group.
        plan: planner of the received routing.
        local: number of experts of a rank.
        replicas: C.
        inside: function that builds the transport inside a node from its planner, the same on all
            nodes.
        recipe: recipe of rows that travel in FP8, inside nodes too.
    """

    def __init__(
        self,
        nodes: Nodes,
        plan: Planner,
        *,
        local: int,
        replicas: int = 0,
        inside: Callable[[Planner], Inside],
        recipe: Fp8Block | None = None,
    ) -> None:
        self._nodes, self._plan, self._recipe = nodes, plan, recipe
        self._node_experts = nodes.size * local
        """Number of experts of a node."""
        self._first_expert = nodes.index * self._node_experts
        first_slot = nodes.index * nodes.size * (local + replicas)
        self._inside = inside(_NodePlanner(plan, nodes, first_slot))

    @classmethod
    def build(cls, context: DispatchContext) -> "Hier":
        transport, nodes = context.transport.inside, context.transport.nodes
        assert transport is not None and nodes is not None
        c, experts = context, nodes.size * context.local

        def inside(plan: Planner) -> Inside:
            in_node = c._replace(
                transport=transport, group=nodes.inside, plan=plan, experts=experts
            )
            return _INSIDE[transport.name].build(in_node)

        replicas = 0 if transport.replication is None else transport.replication.slots
        return cls(nodes, c.plan, local=c.local, replicas=replicas, inside=inside, recipe=c.recipe)

    @classmethod
    def refuse(cls, ranks: Sequence[Rank]) -> Refusal:
        return refuse([rank.node for rank in ranks])

    @classmethod
    def asks(cls) -> tuple[str, ...]:
        return ("symm",)

    @classmethod
    def inside(cls, ranks: Sequence[Rank]) -> Transport:
        """`symm` where all nodes can run it, `alltoall` otherwise."""
        by_node = ([rank for rank in ranks if rank.node == node] for node in _nodes(ranks))
        refusals = (Symm.refuse(members) for members in by_node)
        refusal = one_for_all(ranks, "symm") or next(filter(None, refusals), None)
        if refusal:
            return Transport("alltoall", f"auto; not symm: {refusal}")
        return Transport("symm", "auto")

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        """Costs of rows over the rail to each other node, and of the transport inside."""
        size, rail = reach.node_ranks, reach.nodes * reach.tokens
        wanted = reach.wanted_ranks if reach.pushes else reach.ranks
        rows = Links(wanted * (size - 1) / size, reach.nodes - 1)
        sent = 2 * rail
        """Rows sent to other nodes and received from them."""
        if not reach.pushes:
            back = Links(reach.rows_back * rows.near, rows.far)
            return TransportCosts(rows, back, saved=reach.received, backward=reach.received + sent)
        single = reach.rows_back * rail * (reach.rows_back > 1)
        """Rows that replicas return one by one, with a buffer as in `symm`."""
        return TransportCosts(
            there=rows,
            back=rows,
            # Rows that came over the network are saved.
            resent=NOTHING if reach.keep else Links(rows.near, 0),
            saved=rail + (reach.received if reach.keep else 0),
            backward=sent,
            buffers=SLOTS * reach.received + single,
            exposed=EXPOSED,
        )

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        overlap_fn: OverlapFn = None,
    ) -> Received:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        over_rail, forwarded = None, None
        if self._recipe is not None:
            over_rail = RailRows(self._recipe)
            forwarded = ForwardedRows(self._recipe, over_rail)
        tokens = x_TD, topk_idx_TK, topk_prob_TK
        x_AD, idx_AK, prob_AK = spread(*tokens, self._nodes.rail, over_rail)
        idx_AK = idx_AK - self._first_expert
        in_node = (idx_AK >= 0) & (idx_AK < self._node_experts)
        idx_AK = torch.where(in_node, idx_AK, -1)
        received = self._inside.dispatch(x_AD, idx_AK, prob_AK, overlap_fn, forwarded)
        return received._replace(route=_Route(received.route, over_rail))

    def combine(
        self,
        out_ND: Tensor,
        received: Received,
        shared_expert_fn: SharedExpertFn = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        route: _Route = received.route
        out_AD = self._inside.combine(out_ND, received._replace(route=route.inside))
        more = addends(shared_expert_fn, residual_TD)
        return collect(out_AD, self._nodes.rail, more, route.over_rail)


def _nodes(ranks: Sequence[Rank]) -> list[str]:
    return list(dict.fromkeys(rank.node for rank in ranks))


class _NodePlanner:
    """Planner of the rows of a node, by a planner of the whole group.

    Its rows are in the order of (local rank, node, token), with the experts of a node numbered from
    0; the group's planner takes the order of ranks and the expert ids of the group. With
    replication, ids are those of the ranks' L + C expert slots, and `first` is the node's first.
    """

    def __init__(self, plan: Planner, nodes: Nodes, first: int) -> None:
        self._plan, self._first = plan, first
        self._by_local_rank, self._by_node = (nodes.size, nodes.count), (nodes.count, nodes.size)

    def check(self, x_AD: Tensor, topk_idx_AK: Tensor, topk_prob_AK: Tensor) -> None:
        self._plan.check(x_AD, topk_idx_AK, topk_prob_AK)

    def __call__(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor) -> ExpertPlan:
        # The id -1 becomes an expert of the previous node, or stays negative: no row of this node.
        idx_NK = _swapped(topk_idx_NK, self._by_local_rank) + self._first
        plan = self._plan(idx_NK, _swapped(topk_prob_NK, self._by_local_rank))
        rows = torch.arange(len(idx_NK), dtype=torch.int32, device=idx_NK.device)
        position_N = _swapped(rows, self._by_local_rank)
        return plan._replace(
            row_index_S=position_N.index_select(0, plan.row_index_S),
            inverse_NK=_swapped(plan.inverse_NK, self._by_node),
        )

    def route_to_replicas(
        self, idx_NK: Tensor, experts: int, size: ReplicationSize
    ) -> tuple[ReplicationPlan, Tensor]:
        """Plan with rows in the order of ranks, so that parts keep the FP8 blocks of experts."""
        idx_NK = _swapped(idx_NK, self._by_local_rank)
        plan, slot_NK = self._plan.route_to_replicas(idx_NK, experts, size)
        return plan, _swapped(slot_NK, self._by_node)


def _swapped(rows: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Permute rows from the order (a, b, t) to (b, a, t): [a * b * T, ...], contiguous."""
    return rows.unflatten(0, (*blocks, -1)).transpose(0, 1).flatten(0, 2)
