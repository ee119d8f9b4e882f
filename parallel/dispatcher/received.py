"""What a transport delivers to the experts of a rank, and takes back from them.

Legend: D hidden, N received rows, T tokens of a rank, K slots for experts of a token.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from phalanx.kernels.elementwise import block_sum
from phalanx.kernels.expert_mlp.autograd import Arrived, Overlap
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.replicas import ReplicaExchange
from phalanx.kernels.routing.replication_plan import ReplicationPlan, ReplicationSize

SharedExpertFn = Callable[[], Tensor] | None
"""What to do while rows are on their way back, and to add to them."""
OverlapFn = Callable[[], None] | None
"""What to do while rows are on their way to experts."""


class Received(NamedTuple):
    """What a rank's experts work on."""

    rows_ND: Tensor
    """Received tokens, rank-major. Rows that `plan` does not name are unspecified: never read."""
    plan: ExpertPlan
    """Which of the rows each local expert reads."""
    overlap: Overlap | None = None
    """Exchanges that overlap the experts, whose kernels wait for rows; None: all have arrived."""
    arrived: Arrived | None = None
    """The rows in FP8; `rows_ND` is without data then. None: they are as they were sent."""
    route: Any = None
    """The transport's own: what the way back needs."""
    saving: Callable[[], AbstractContextManager] = nullcontext
    """Context for what saves rows for the backward pass: rows may be in a buffer that is reused."""
    replicas: ReplicaExchange | None = None
    """Experts of other ranks, whose places in `plan` are behind those of this rank's own."""
    replication_plan: ReplicationPlan | None = None
    """Which these are, on all ranks that share experts: with `hier` those of a node, by its own
    numbers. None: nothing is replicated."""


class Planner(Protocol):
    """Makes plans for the experts of this rank, with room as the budget says."""

    def check(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> None:
        """Raise ValueError for tokens and routing that no plan can be made of."""
        ...

    def __call__(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor) -> ExpertPlan:
        """The plan of the routing of all received rows."""
        ...

    def route_to_replicas(
        self, idx_NK: Tensor, experts: int, size: ReplicationSize
    ) -> tuple[ReplicationPlan, Tensor]:
        """`kernels.routing.replica_routing` of the experts of all received rows."""
        ...


def run_overlap_fn(overlap_fn: OverlapFn) -> None:
    """What a transport does that has nothing on its way."""
    if overlap_fn is not None:
        overlap_fn()


def plus(out_TD: Tensor, beside: SharedExpertFn, residual_TD: Tensor | None) -> Tensor:
    """What a transport adds that cannot do anything meanwhile."""
    return block_sum.plus(out_TD, addends(beside, residual_TD))


def addends(beside: SharedExpertFn, residual_TD: Tensor | None) -> tuple[Tensor, ...]:
    """What is added to the sums of tokens, in this order."""
    made = None if beside is None else beside()
    return tuple(addend for addend in (made, residual_TD) if addend is not None)
