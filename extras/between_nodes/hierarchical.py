"""Transport `hier`: expert-parallel groups over several nodes, each token once to each node.

Ranks with the same local rank exchange over a rail (`extras.between_nodes`). A token is sent once
to each node that holds one of its experts, with its routing, in blocks of C rows for each node
(`extras.between_nodes.rail_blocks`). Each rank then sends the rows of its blocks like tokens of its
own to the ranks of its node by the transport inside: `symm` where that can run, which sends a row
only to the ranks that hold one of its experts, or else `alltoall`. C is at most T; the budget has
its own capacity for it (`parallel.dispatcher.capacity`). If groups of experts are whole nodes, the
router's `group_topk` is a bound on the nodes of a token.

On the way back a token's expert rows are added by the experts of each rank, these sums over the
ranks of a node in their order, and those over the nodes in their order: each time in fp32, rounded
once to the tokens' dtype. Gradients of tokens take the same path. Shared experts compute while sums
and gradients of sums are between nodes; weight gradients hide those of tokens.

The transport inside receives rows in the order of (local rank, node, row of the block), not of
ranks. The plan is computed from routing in the order of ranks, in which rows of a block are in the
order of their tokens, so that expert rows are those of every other transport; it then names rows by
their positions. Rows of blocks without a token have no experts, and are never read.

Legend: T tokens per rank, D hidden, K expert ids of a token, M nodes, G ranks of each, R = M * G, C
rows of a block, B = M * C rows of a rail, N = R * C received rows.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.extras.between_nodes import rows as rail_rows
from phalanx.extras.between_nodes.rail_blocks import RailBlocks, plan_blocks
from phalanx.extras.between_nodes.rows import CollectiveRail, Rail, RailCall, send_routing
from phalanx.kernels.derivatives import in_backward
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.sm90.exchange.peer_buffers import SLOTS
from phalanx.parallel.dispatcher.alltoall import AllToAll
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.costs import (
    NOTHING,
    GroupTopology,
    Links,
    TopKSampling,
    TransportCosts,
    owner_probabilities,
)
from phalanx.parallel.dispatcher.fp8_rows import ForwardedRows, RailRows
from phalanx.parallel.dispatcher.nodes import Nodes
from phalanx.parallel.dispatcher.symm import EXPOSED, Symm
from phalanx.parallel.dispatcher.transport import build
from phalanx.parallel.dispatcher.transport_class import (
    DispatchContext,
    Dispatcher,
    Planner,
    Received,
)

Inside = Symm | AllToAll  # transports inside a node, which forward rows that arrived in FP8


class _Sent(NamedTuple):
    call: RailCall
    rows_BD: Tensor
    prob_BK: Tensor
    forwarded: ForwardedRows | None  # format in which rows go on inside the node; None: as they are
    tokens: int  # T


class _Route(NamedTuple):
    call: RailCall
    inside: Any  # state of the transport inside the node


class Hier(Dispatcher):
    """The transport `hier`; `parallel.dispatcher.base` states the contract.

    Args:
        plan: planner of the received routing.
        budget: budget of the rows of blocks.
        sampling: choice of a token's experts.
        local, local_slots: numbers of experts and of expert slots of a rank.
        inside: function that builds the transport inside a node from its planner, the same on all
            nodes.
        recipe: recipe of rows that travel in FP8, inside nodes too.
    """

    splits_shared_experts = False

    def __init__(
        self,
        nodes: Nodes,
        plan: Planner,
        budget: Budget,
        sampling: TopKSampling,
        rail: Rail,
        *,
        local: int,
        local_slots: int,
        inside: Callable[[Planner], Inside],
        recipe: Fp8Block | None = None,
    ) -> None:
        self._nodes, self._plan, self._recipe = nodes, plan, recipe
        self._rail, self._budget = rail, budget
        self._share = max(
            owner_probabilities(sampling, [sampling.experts // nodes.count] * nodes.count)
        )
        self._node_experts = nodes.size * local
        first_slot = nodes.index * nodes.size * local_slots
        self._node_plan = _NodePlanner(plan, nodes, first_slot)
        self._inside = inside(self._node_plan)

    @classmethod
    def build(cls, context: DispatchContext) -> "Hier":
        transport, nodes = context.transport.inside, context.transport.nodes
        assert transport is not None and nodes is not None
        c, experts = context, nodes.size * context.local
        assert c.budget is not None and c.sampling is not None

        def inside(plan: Planner) -> Inside:
            in_node = c._replace(
                transport=transport, group=nodes.inside, plan=plan, experts=experts
            )
            dispatcher = build(in_node)
            assert isinstance(dispatcher, Symm | AllToAll)
            return dispatcher

        return cls(
            nodes,
            c.plan,
            c.budget,
            c.sampling,
            CollectiveRail(c.collectives(nodes.rail)),
            local=c.local,
            local_slots=c.local_slots,
            inside=inside,
            recipe=c.recipe,
        )

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        """Costs of the blocks to each other node, full or not, and of the transport inside."""
        size, rail, received = reach.node_ranks, reach.nodes * reach.block, reach.received_blocks
        share = reach.block / reach.tokens
        wanted = reach.wanted_ranks if reach.pushes else reach.ranks * share
        rows = Links(wanted * (size - 1) / size, (reach.nodes - 1) * share)
        sent = 2 * rail  # rows sent to other nodes and received from them
        if not reach.pushes:
            back = Links(reach.rows_back * rows.near, rows.far)
            return TransportCosts(rows, back, saved=received, backward=received + sent)
        single = reach.rows_back * rail * (reach.rows_back > 1)
        """Rows that come back unreduced, with a buffer as in `symm`."""
        return TransportCosts(
            there=rows,
            back=rows,
            # Rows that came over the network are saved.
            resent=NOTHING if reach.keep else Links(rows.near, 0),
            saved=rail + (received if reach.keep else 0),
            backward=sent,
            buffers=SLOTS * received + single,
            exposed=EXPOSED,
        )

    def send_tokens(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Any:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        over_rail, forwarded = None, None
        if self._recipe is not None:
            over_rail = RailRows(self._recipe)
            forwarded = ForwardedRows(self._recipe, over_rail)
        blocks = send_routing(self._rail, self._blocks(topk_idx_TK, topk_prob_TK))
        call = RailCall(self._rail, blocks, over_rail)
        return _Sent(call, *rail_rows.send_tokens(call, x_TD, topk_prob_TK), forwarded, len(x_TD))

    def receive_tokens(self, sent: _Sent) -> Received:
        self._node_plan.tokens = sent.tokens
        rows_BD, prob_BK = rail_rows.receive_tokens(sent.call, sent.rows_BD, sent.prob_BK)
        idx_BK = sent.call.blocks.idx_BK
        in_node = self._inside.send_tokens(rows_BD, idx_BK, prob_BK, sent.forwarded)
        received = self._inside.receive_tokens(in_node)
        return received._replace(route=_Route(sent.call, received.route))

    def send_sums(self, out_ND: Tensor, received: Received, *, alone: bool = True) -> Tensor:
        call, inside = received.route
        sums_BD = self._inside.combine(out_ND, received._replace(route=inside))
        return rail_rows.send_sums(call, sums_BD)

    def receive_sums(
        self, sent: Tensor, received: Received, addends: Sequence[Tensor] = ()
    ) -> Tensor:
        return rail_rows.receive_sums(received.route.call, sent, addends)

    def _blocks(self, idx_TK: Tensor, prob_TK: Tensor) -> RailBlocks:
        tokens, nodes = len(idx_TK), self._nodes.count
        rows = self._budget.block_rows(tokens, self._share)
        blocks = plan_blocks(idx_TK, prob_TK, nodes=nodes, experts=self._node_experts, rows=rows)
        # A recomputation needs as many rows.
        if rows < tokens and not in_backward():
            self._budget.blocks.observe(blocks.needed, rows)
        return blocks


class _NodePlanner:
    """Planner of the rows of a node, by a planner of the whole group.

    Its rows are in the order of (local rank, node, row of the block), with the experts of a node
    numbered from 0; the group's planner takes the order of ranks and the ids of the group. Ids are
    expert slots, and `first` is the first of the node.
    """

    tokens: int  # of a rank in the call in progress; blocks need not hold all of them

    def __init__(self, plan: Planner, nodes: Nodes, first: int) -> None:
        self._plan, self._first = plan, first
        self._by_local_rank, self._by_node = (nodes.size, nodes.count), (nodes.count, nodes.size)

    def check(self, x_AD: Tensor, topk_idx_AK: Tensor, topk_prob_AK: Tensor) -> None:
        self._plan.check(x_AD, topk_idx_AK, topk_prob_AK)

    def __call__(
        self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, tokens: int | None = None
    ) -> ExpertPlan:
        # The id -1 becomes an expert of the previous node, or stays negative: no row of this node.
        idx_NK = _swapped(topk_idx_NK, self._by_local_rank) + self._first
        prob_NK = _swapped(topk_prob_NK, self._by_local_rank)
        plan = self._plan(idx_NK, prob_NK, self.tokens)
        rows = torch.arange(len(idx_NK), dtype=torch.int32, device=idx_NK.device)
        position_N = _swapped(rows, self._by_local_rank)
        assert plan.row_index_S is not None and plan.inverse_NK is not None  # without replicas
        return plan._replace(
            row_index_S=position_N.index_select(0, plan.row_index_S),
            inverse_NK=_swapped(plan.inverse_NK, self._by_node),
        )

    def by_rank(self, rows: Tensor) -> Tensor:
        return self._plan.by_rank(_swapped(rows, self._by_local_rank))

    def by_arrival(self, rows: Tensor) -> Tensor:
        return _swapped(self._plan.by_arrival(rows), self._by_node)


def _swapped(rows: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Permute rows from the order (a, b, t) to (b, a, t): [a * b * T, ...], contiguous."""
    return rows.unflatten(0, (*blocks, -1)).transpose(0, 1).flatten(0, 2)
