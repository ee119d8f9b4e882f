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

Legend: T tokens per rank, D hidden, K slots for experts of a token, M nodes, G ranks of each,
R = M * G, A = M * T tokens of a rail, N = R * T received rows.
"""

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.parallel.dispatch.alltoall import AllToAll, collect, spread
from phalanx.parallel.dispatch.exchange import SymmOptions
from phalanx.parallel.dispatch.nodes import Nodes
from phalanx.parallel.dispatch.received import Beside, Meanwhile, Planner, Received, plus
from phalanx.parallel.dispatch.symm import Symm


class Hier:
    """The transport. See `parallel.dispatch` for its contract.

    Args:
        nodes: of the expert-parallel group.
        plan: makes plans of received routing.
        inside: the transport inside a node, `symm` or `alltoall`, the same on all nodes.
        local: experts of a rank.
        options, waits: of `symm`, inside a node.
    """

    def __init__(
        self,
        nodes: Nodes,
        plan: Planner,
        *,
        inside: str,
        local: int,
        options: SymmOptions,
        waits: bool = False,
    ) -> None:
        self._nodes, self._plan = nodes, plan
        self._here = nodes.size * local
        """Experts of a node."""
        self._first = nodes.index * self._here
        there = _InNodes(plan, nodes, self._first)
        self._inside: Symm | AllToAll
        if inside == "symm":
            self._inside = Symm(nodes.inside, there, local=local, options=options, waits=waits)
        else:
            self._inside = AllToAll(nodes.inside, there)

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        meanwhile: Meanwhile = None,
    ) -> Received:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        x_AD, idx_AK, prob_AK = spread(x_TD, topk_idx_TK, topk_prob_TK, self._nodes.rail)
        idx_AK = idx_AK - self._first
        in_node = (idx_AK >= 0) & (idx_AK < self._here)
        idx_AK = torch.where(in_node, idx_AK, -1)
        return self._inside.dispatch(x_AD, idx_AK, prob_AK, meanwhile)

    def combine(self, out_ND: Tensor, received: Received, beside: Beside = None) -> Tensor:
        out_AD = self._inside.combine(out_ND, received)
        return plus(collect(out_AD, self._nodes.rail), beside)


class _InNodes:
    """Plans of routing in the order of (place, node, token), with the experts of a node numbered
    from 0, by a planner that takes the order of ranks and the numbers of the whole group."""

    def __init__(self, plan: Planner, nodes: Nodes, first: int) -> None:
        self._plan, self._first = plan, first
        self._nodes, self._places = nodes.count, nodes.size

    def check(self, x_AD: Tensor, topk_idx_AK: Tensor, topk_prob_AK: Tensor) -> None:
        self._plan.check(x_AD, topk_idx_AK, topk_prob_AK)

    def __call__(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor) -> ExpertPlan:
        by_place, by_node = (self._places, self._nodes), (self._nodes, self._places)
        # An empty slot becomes an expert of the node before, or stays negative: no row here.
        idx_NK = _swapped(topk_idx_NK, by_place) + self._first
        plan = self._plan(idx_NK, _swapped(topk_prob_NK, by_place))
        rows = torch.arange(len(idx_NK), dtype=torch.int32, device=idx_NK.device)
        lies_N = _swapped(rows, by_place)
        return plan._replace(
            row_index_S=lies_N.index_select(0, plan.row_index_S),
            inverse_NK=_swapped(plan.inverse_NK, by_node),
        )


def _swapped(rows: Tensor, blocks: tuple[int, int]) -> Tensor:
    """Rows in the order of (a, b, t) in that of (b, a, t): [a * b * T, ...], contiguous."""
    return rows.unflatten(0, (*blocks, -1)).transpose(0, 1).flatten(0, 2)
