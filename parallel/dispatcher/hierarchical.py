"""Transport `hier`: expert-parallel groups over several nodes, each token once to each node.

Number p of every node exchanges with number p of the others, by collectives of gloo or NCCL along
this rail: an all-gather of tokens, whatever their routing, so that no count is needed. Each rank
then holds the tokens of its rail, as if they were its own, and brings them to the ranks of its node
by the transport inside: `symm` where that can run, which sends a token only to the ranks that hold
one of its experts, or else `alltoall`. Between nodes a row crosses M - 1 times in each direction,
where `alltoall` moves R - R / M of them.

On the way back a token's expert rows are added up by the experts of each rank, these sums over the
ranks of a node in their order, and those over the nodes in their order: each time in fp32, rounded
once to the tokens' dtype. Gradients of tokens take the same way.

What the transport inside receives lies in the order of (place in the node, node, token), not of
ranks. The plan is made of routing in the order of ranks, so that expert rows are those of every
other transport, and then names rows where they lie.

Hot experts are replicated by the transport inside, in each node by itself: its ranks have all rows
of their experts then. Neither weights nor plans pass the network.

Legend: T tokens per rank, D hidden, K slots for experts of a token, M nodes, G ranks of each,
R = M * G, A = M * T tokens of a rail, N = R * T received rows, C replica slots of a rank.
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
from phalanx.parallel.dispatcher.fp8_rows import FirstLeg, SecondLeg
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
"""The transports inside a node, which send on what has come in FP8."""
_INSIDE: dict[str, type[Inside]] = {"symm": Symm, "alltoall": AllToAll}


class _Route(NamedTuple):
    """The `route` of what has been received."""

    inside: Any
    """That of the transport inside a node."""
    over_rail: FirstLeg | None
    """How rows travel between nodes in FP8; None: as they are."""


class Hier(Dispatcher):
    """The transport. See `parallel.dispatch` for its contract.

    Args:
        nodes: of the expert-parallel group.
        plan: makes plans of received routing.
        local: experts of a rank.
        replicas: C.
        inside: builds the transport inside a node, the same on all nodes, from its plans.
        recipe: of rows that travel in FP8, inside nodes too.
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
        self._here = nodes.size * local
        """Experts of a node."""
        self._first = nodes.index * self._here
        first_place = nodes.index * nodes.size * (local + replicas)
        self._inside = inside(_InNodes(plan, nodes, first_place))

    @classmethod
    def build(cls, context: DispatchContext) -> "Hier":
        taken, nodes = context.transport.inside, context.transport.nodes
        assert taken is not None and nodes is not None
        c, experts = context, nodes.size * context.local

        def inside(plan: Planner) -> Inside:
            there = c._replace(transport=taken, group=nodes.inside, plan=plan, experts=experts)
            return _INSIDE[taken.name].build(there)

        replicas = 0 if taken.replication is None else taken.replication.slots
        return cls(nodes, c.plan, local=c.local, replicas=replicas, inside=inside, recipe=c.recipe)

    @classmethod
    def refuse(cls, ranks: Sequence[Rank]) -> Refusal:
        return refuse([rank.node for rank in ranks])

    @classmethod
    def asks(cls) -> tuple[str, ...]:
        return ("symm",)

    @classmethod
    def inside(cls, ranks: Sequence[Rank]) -> Transport:
        """`symm` where all nodes can, `alltoall` otherwise."""
        by_node = ([rank for rank in ranks if rank.node == node] for node in _nodes(ranks))
        refusals = (Symm.refuse(members) for members in by_node)
        against = one_for_all(ranks, "symm") or next(filter(None, refusals), None)
        if against:
            return Transport("alltoall", f"auto; not symm: {against}")
        return Transport("symm", "auto")

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        """Rows of the rail once to each other node, and from there by the transport inside."""
        size, rail = reach.node_ranks, reach.nodes * reach.tokens
        wanted = reach.wanted_ranks if reach.pushes else reach.ranks
        rows = Links(wanted * (size - 1) / size, reach.nodes - 1)
        sent = 2 * rail
        """To other nodes and received from them."""
        if not reach.pushes:
            back = Links(reach.rows_back * rows.near, rows.far)
            return TransportCosts(rows, back, saved=reach.received, backward=reach.received + sent)
        single = reach.rows_back * rail * (reach.rows_back > 1)
        """Those of clones, for which there is room as with `symm`."""
        return TransportCosts(
            there=rows,
            back=rows,
            # What came over the network is kept.
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
        over_rail, onward = None, None
        if self._recipe is not None:
            over_rail = FirstLeg(self._recipe)
            onward = SecondLeg(self._recipe, over_rail)
        given = x_TD, topk_idx_TK, topk_prob_TK
        x_AD, idx_AK, prob_AK = spread(*given, self._nodes.rail, over_rail)
        idx_AK = idx_AK - self._first
        in_node = (idx_AK >= 0) & (idx_AK < self._here)
        idx_AK = torch.where(in_node, idx_AK, -1)
        received = self._inside.dispatch(x_AD, idx_AK, prob_AK, overlap_fn, onward)
        return received._replace(route=_Route(received.route, over_rail))

    def combine(
        self,
        out_ND: Tensor,
        received: Received,
        beside: SharedExpertFn = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        route: _Route = received.route
        out_AD = self._inside.combine(out_ND, received._replace(route=route.inside))
        more = addends(beside, residual_TD)
        return collect(out_AD, self._nodes.rail, more, route.over_rail)


def _nodes(ranks: Sequence[Rank]) -> list[str]:
    return list(dict.fromkeys(rank.node for rank in ranks))


class _InNodes:
    """Plans of routing in the order of (place, node, token), with the experts of a node numbered
    from 0, by a planner that takes the order of ranks and the numbers of the whole group.

    With replication, `first` and the numbers that are planned are those of the ranks' L + C places
    for experts.
    """

    def __init__(self, plan: Planner, nodes: Nodes, first: int) -> None:
        self._plan, self._first = plan, first
        self._by_place, self._by_node = (nodes.size, nodes.count), (nodes.count, nodes.size)

    def check(self, x_AD: Tensor, topk_idx_AK: Tensor, topk_prob_AK: Tensor) -> None:
        self._plan.check(x_AD, topk_idx_AK, topk_prob_AK)

    def __call__(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor) -> ExpertPlan:
        # An empty slot becomes an expert of the node before, or stays negative: no row here.
        idx_NK = _swapped(topk_idx_NK, self._by_place) + self._first
        plan = self._plan(idx_NK, _swapped(topk_prob_NK, self._by_place))
        rows = torch.arange(len(idx_NK), dtype=torch.int32, device=idx_NK.device)
        lies_N = _swapped(rows, self._by_place)
        return plan._replace(
            row_index_S=lies_N.index_select(0, plan.row_index_S),
            inverse_NK=_swapped(plan.inverse_NK, self._by_node),
        )

    def route_to_replicas(
        self, idx_NK: Tensor, experts: int, size: ReplicationSize
    ) -> tuple[ReplicationPlan, Tensor]:
        """An expert's rows are parted in the order in which it has them without replication, so
        that parts keep its blocks of FP8."""
        idx_NK = _swapped(idx_NK, self._by_place)
        plan, slot_NK = self._plan.route_to_replicas(idx_NK, experts, size)
        return plan, _swapped(slot_NK, self._by_node)


def _swapped(rows: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Rows in the order of (a, b, t) in that of (b, a, t): [a * b * T, ...], contiguous."""
    return rows.unflatten(0, (*blocks, -1)).transpose(0, 1).flatten(0, 2)
