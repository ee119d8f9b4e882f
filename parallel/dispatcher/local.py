"""Transport `local`: all experts are on one rank.

Legend: T tokens of the rank, D hidden, K expert ids of a token, N = T received rows.
"""

from collections.abc import Sequence

from torch import Tensor

from phalanx.kernels.refusal import Refusal
from phalanx.parallel.dispatcher.costs import GroupTopology, TransportCosts
from phalanx.parallel.dispatcher.received import (
    OverlapFn,
    Planner,
    Received,
    SharedExpertFn,
    plus,
    run_overlap_fn,
)
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Dispatcher, Rank


class Local(Dispatcher):
    """The transport `local`: all experts are on this rank, nothing is copied."""

    no_overlap = "nothing is exchanged"
    sends_back = False

    def __init__(self, plan: Planner) -> None:
        self._plan = plan

    @classmethod
    def build(cls, context: DispatchContext) -> "Local":
        return cls(context.plan)

    @classmethod
    def refuse(cls, ranks: Sequence[Rank]) -> Refusal:
        return None  # configs.transports states that it serves one rank

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        return TransportCosts()

    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        overlap_fn: OverlapFn = None,
    ) -> Received:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        run_overlap_fn(overlap_fn)
        return Received(x_TD, self._plan(topk_idx_TK, topk_prob_TK), None)

    def combine(
        self,
        out_ND: Tensor,
        received: Received,
        shared_expert_fn: SharedExpertFn = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        return plus(out_ND, shared_expert_fn, residual_TD)
