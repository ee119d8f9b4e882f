"""Dispatch and combine: tokens to the ranks of their experts, experts' sums back to their tokens.

Every transport delivers rows at fixed positions: token t of rank r of the expert-parallel group is
received row r * T + t on every rank (`hier` has other rows), so no host needs a count and all
shapes are static. T must be the same on all ranks of the group. Expert rows are the same on all
transports, bit for bit. Both directions are differentiable and deterministic: contributions of
ranks are summed in fp32 in an order that depends on shapes alone.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N = R * T.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from phalanx.configs.knobs import pluralize
from phalanx.kernels.derivatives import in_backward
from phalanx.kernels.elementwise import sums
from phalanx.kernels.expert_mlp.backend import rows_for
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, check_expert_ids, is_debugging
from phalanx.kernels.limits import Refusal
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.routing.plan import check_routing, make_plan
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.costs import GroupTopology, TopKSampling, TransportCosts
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport import build
from phalanx.parallel.dispatcher.transport_class import (
    DispatchContext,
    Dispatcher,
    Planner,
    Rank,
    Received,
    Transport,
)


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
        return Received(x_TD, self._plan(topk_idx_TK, topk_prob_TK), inputs_persist=True)

    def receive_sums(
        self, sent: Tensor, received: Received, addends: Sequence[Tensor] = ()
    ) -> Tensor:
        return sums.plus(sent, addends)


@dataclass(frozen=True)
class TokenChoices:
    """Shape of a token's row of expert ids, and the bound on expert rows that follows from it."""

    top_k: int  # number of experts of a token, on average
    width: int  # number of ids in the row: `top_k`, or more if some are -1
    surplus: int = 0  # rows by which choices of one expert may exceed top-k routing
    groups: int = 1  # of which the router limits a token to `group_topk`
    group_topk: int = 1

    def max_rows(self, tokens: int, ranks: int, local: int) -> int:
        """Most expert rows that `local` experts can need for the tokens of all ranks."""
        chosen = tokens * min(self.top_k, local) + self.surplus * local
        return ranks * min(tokens * min(self.width, local), chosen)


class BudgetPlanner:
    """Planner of this rank's expert slots from the received routing, within the budget.

    Slots are experts, unless there are more slots than experts.
    """

    def __init__(
        self, slots: TokenChoices, budget: Budget, backend: str, ranks: int, first: int, local: int
    ) -> None:
        self._slots, self._budget, self._backend = slots, budget, backend
        self._ranks, self._first, self._local = ranks, first, local

    def check(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> None:
        check_routing(topk_idx_TK, topk_prob_TK)
        if x_TD.ndim != 2 or topk_idx_TK.shape != (x_TD.shape[0], self._slots.width):
            raise ValueError(
                f"tokens {tuple(x_TD.shape)} do not fit expert ids {tuple(topk_idx_TK.shape)} "
                f"with {self._slots.width} slots for top_k={self._slots.top_k}"
            )
        if is_debugging():
            check_expert_ids(topk_idx_TK, self._ranks * self._local)

    def __call__(
        self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, tokens: int | None = None
    ) -> ExpertPlan:
        slots = self._slots
        tokens = len(topk_idx_NK) // self._ranks if tokens is None else tokens
        most = slots.max_rows(tokens, self._ranks, self._local)
        pairs = self._budget.rows(tokens, slots.top_k, self._ranks, self._local, most=most)
        rows = rows_for(pairs, self._local, self._backend)
        plan = make_plan(
            topk_idx_NK,
            topk_prob_NK,
            first_expert=self._first,
            local_experts=self._local,
            rows=rows,
            backend=self._backend,
        )
        # A recomputation needs as many rows, and may run beside another micro-batch's forward pass.
        if pairs < most and not in_backward():
            assert plan.needed is not None
            # The budget counts rows without the padding that the backend adds.
            needed = plan.needed if rows == pairs else plan.needed - (rows - pairs)
            self._budget.experts.observe(needed, pairs)
        return plan

    def by_rank(self, rows: Tensor) -> Tensor:
        return rows

    def by_arrival(self, rows: Tensor) -> Tensor:
        return rows


def make_dispatcher(
    transport: Transport,
    *,
    group: dist.ProcessGroup | None,
    experts: int,
    slots: TokenChoices,
    budget: Budget,
    backend: str = "torch",
    symm: SymmOptions = SymmOptions(),  # noqa: B008  (frozen)
    recipe: Fp8Block | None = None,
    fp8_rows: bool = False,
    connections: Connections | None = None,
) -> Dispatcher:
    """The dispatcher of a group (None: one rank) for the transport of `choose_transport`.

    Args:
        backend: that of the experts and of `kernels.routing.plan`.
        symm: options of `symm`, also inside the nodes of `hier`.
        fp8_rows: with a recipe, rows travel in FP8; on one rank nothing travels.
        connections: memory shared with other ranks, which `symm` needs.

    Raises:
        ValueError: experts that do not divide over the ranks, or top_k above experts.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    if experts % ranks:
        raise ValueError(
            f"{experts} experts do not divide over {pluralize(ranks, 'rank')}: "
            "set parallel.expert to a divisor"
        )
    if not 1 <= slots.top_k <= experts:
        raise ValueError(
            f"model.moe.top_k={slots.top_k} must be between 1 and the {experts} experts"
        )
    local = experts // ranks
    local_slots = local + transport.replica_slots
    first = 0 if group is None else dist.get_rank(group) * local_slots
    plan = BudgetPlanner(slots, budget, backend, ranks, first, local_slots)
    if group is None:
        return Local(plan)
    context = DispatchContext(
        transport,
        group,
        plan,
        experts,
        local,
        local_slots,
        backend,
        symm,
        connections=connections,
        budget=budget,
        sampling=TopKSampling(experts, slots.top_k, slots.groups, slots.group_topk),
    )
    if recipe is not None:
        recipe_on_wire = recipe if fp8_rows else None
        context = context._replace(recipe=recipe_on_wire, quantizes=not fp8_rows)
    return build(context)
