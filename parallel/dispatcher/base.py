"""Dispatch and combine: tokens to the ranks of their experts, experts' sums back to their tokens.

The two ends of an MoE layer around the experts. Every transport delivers fixed rows: token t of
rank r of the expert-parallel group is received row r * T + t on every rank (`hier` has an order of
its own), so no host ever knows a count and all shapes are static. T must be the same on all ranks
of the group. Expert rows are the same on all transports, bit for bit. Both directions are
differentiable and deterministic: contributions of ranks are summed in fp32 in an order that depends
on shapes alone. `deepep`, a package of others, makes fewer promises.

Legend: T tokens per rank, D hidden, K slots for experts of a token, R ranks, N = R * T.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from phalanx.configs.knobs import pluralize
from phalanx.kernels import debug
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.providers import rows_for
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.routing.clone_plan import ClonePlan, CloneSize
from phalanx.kernels.routing.clone_routing import clone_routing
from phalanx.kernels.routing.plan import check_routing, make_plan
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.local import Local
from phalanx.parallel.dispatcher.transport import class_of
from phalanx.parallel.dispatcher.transport_class import DispatchContext, Dispatcher, Transport


@dataclass(frozen=True)
class Slots:
    """What a token's row of expert ids looks like, and how many expert rows follow from it."""

    top_k: int
    """Experts of a token on average."""
    width: int
    """Ids in the row: `top_k`, or more if some are -1."""
    surplus: int = 0
    """Rows by which a rank's choices of one expert may exceed those of top-k routing."""

    def most(self, tokens: int, ranks: int, local: int) -> int:
        """Expert rows that `local` experts can need at most for the tokens of all ranks."""
        chosen = tokens * min(self.top_k, local) + self.surplus * local
        return ranks * min(tokens * min(self.width, local), chosen)


class BudgetPlanner:
    """From received routing to the plan of this rank's experts, within the budget.

    With clones ids are those of places (`kernels.routing.clone_routing`), some of them of guests.
    """

    def __init__(
        self, slots: Slots, budget: Budget, backend: str, ranks: int, first: int, local: int
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
        if debug.on():
            debug.check_expert_ids(topk_idx_TK, self._ranks * self._local)

    def __call__(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor) -> ExpertPlan:
        tokens, slots = topk_idx_NK.shape[0] // self._ranks, self._slots
        most = slots.most(tokens, self._ranks, self._local)
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
        if pairs < most:
            assert plan.needed is not None
            # Of the rows that are needed, without those that are kept for padding.
            needed = plan.needed if rows == pairs else plan.needed - (rows - pairs)
            self._budget.observe(needed, pairs)
        return plan

    def clone_routing(
        self, idx_NK: Tensor, experts: int, size: CloneSize
    ) -> tuple[ClonePlan, Tensor]:
        return clone_routing(idx_NK, experts, size)


def make_dispatcher(
    transport: Transport,
    *,
    group: dist.ProcessGroup | None,
    experts: int,
    slots: Slots,
    budget: Budget,
    backend: str = "torch",
    symm: SymmOptions = SymmOptions(),  # noqa: B008  (frozen)
    recipe: Fp8Block | None = None,
    fp8_rows: bool = False,
) -> Dispatcher:
    """The dispatcher of a group, over what `parallel.dispatcher.transport.choose_transport` found for
    it.

    Args:
        transport: of the group.
        group: expert-parallel; None is one rank.
        experts: of all ranks.
        slots: of a token.
        budget: rows of the experts, shared by all layers.
        backend: of the experts and of `kernels.routing.plan`, which makes the plans.
        symm: options of that transport, also inside the nodes of `hier`.
        recipe: of the experts.
        fp8_rows: with a recipe, rows travel in FP8; on one rank nothing travels.

    Raises:
        ValueError: experts that do not divide over the ranks, or top_k above experts.
    """
    ranks = 1 if group is None else dist.get_world_size(group)
    clones = (transport.inside or transport).clones
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
    places = local if clones is None else local + clones.slots
    first = 0 if group is None else dist.get_rank(group) * places
    plan = BudgetPlanner(slots, budget, backend, ranks, first, places)
    if group is None:
        return Local(plan)
    context = DispatchContext(transport, group, plan, experts, local, backend, symm)
    if recipe is not None:
        travels = recipe if fp8_rows else None
        context = context._replace(recipe=travels, quantizes=not fp8_rows)
    return class_of(transport.name).build(context)
