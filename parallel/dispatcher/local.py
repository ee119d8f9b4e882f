"""Transport `local`: all experts are on one rank.

Legend: T tokens of the rank, D hidden, K expert ids of a token, N = T received rows.
"""

from collections.abc import Sequence

from torch import Tensor

from phalanx.kernels.elementwise import block_sum
from phalanx.kernels.refusal import Refusal
from phalanx.parallel.dispatcher.costs import GroupTopology, TransportCosts
from phalanx.parallel.dispatcher.received import Planner, Received
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
        return None  # configs.tables.transports states that it serves one rank

    @classmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        return TransportCosts()

    def send_tokens(
        self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._plan.check(x_TD, topk_idx_TK, topk_prob_TK)
        return x_TD, topk_idx_TK, topk_prob_TK

    def receive_tokens(self, sent: tuple[Tensor, Tensor, Tensor]) -> Received:
        x_TD, topk_idx_TK, topk_prob_TK = sent
        return Received(x_TD, self._plan(topk_idx_TK, topk_prob_TK), stays=True)

    def receive_sums(
        self, sent: Tensor, received: Received, addends: Sequence[Tensor] = ()
    ) -> Tensor:
        return block_sum.plus(sent, addends)
