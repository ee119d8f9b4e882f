"""Rows that a transport delivers to the experts of a rank, and the planner of these rows.

Legend: D hidden, N received rows, T tokens of a rank, K expert ids of a token.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from phalanx.kernels.elementwise import block_sum
from phalanx.kernels.expert_mlp.autograd import Fp8Inputs, Overlap
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.replicas import ReplicaExchange
from phalanx.kernels.routing.replication_plan import ReplicationPlan, ReplicationSize

SharedExpertFn = Callable[[], Tensor] | None
"""Function whose result [T, D] is added to the combined rows; runs while these are in flight."""
OverlapFn = Callable[[], None] | None
"""Function that runs while rows are in flight to the experts."""


class Received(NamedTuple):
    """Input of the experts of a rank."""

    rows_ND: Tensor
    """Received tokens, rank-major. Rows that `plan` does not name are undefined, never read."""
    plan: ExpertPlan
    """Rows that each local expert reads."""
    overlap: Overlap | None = None
    """Exchanges that overlap the experts, whose kernels wait for rows; None: all have arrived."""
    fp8_inputs: Fp8Inputs | None = None
    """Received rows in FP8, while `rows_ND` is without data; None: `rows_ND` has the data."""
    route: Any = None
    """State of the transport that its `combine` needs."""
    saving: Callable[[], AbstractContextManager] = nullcontext
    """Context in which rows are saved for backward: they may be in a buffer that is reused."""
    replicas: ReplicaExchange | None = None
    """Exchange of replicas, whose slots in `plan` follow the ones of this rank's own experts."""
    replication_plan: ReplicationPlan | None = None
    """Plan of the ranks that share experts (with `hier` a node); None: no replication."""


class Planner(Protocol):
    """Planner of the experts of this rank, within the budget of rows."""

    def check(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> None:
        """Raise ValueError for tokens and routing that do not fit the plan."""
        ...

    def __call__(self, topk_idx_NK: Tensor, topk_prob_NK: Tensor) -> ExpertPlan:
        """Plan of the received rows from their routing."""
        ...

    def route_to_replicas(
        self, idx_NK: Tensor, experts: int, size: ReplicationSize
    ) -> tuple[ReplicationPlan, Tensor]:
        """Replication plan and slots from the expert ids of received rows, by `replica_routing`."""
        ...


def run_overlap_fn(overlap_fn: OverlapFn) -> None:
    """Run it, in a transport that has nothing in flight meanwhile."""
    if overlap_fn is not None:
        overlap_fn()


def plus(out_TD: Tensor, shared_expert_fn: SharedExpertFn, residual_TD: Tensor | None) -> Tensor:
    """`out_TD` with the addends, in a transport without overlap."""
    return block_sum.plus(out_TD, addends(shared_expert_fn, residual_TD))


def addends(shared_expert_fn: SharedExpertFn, residual_TD: Tensor | None) -> tuple[Tensor, ...]:
    """Tensors to add to the sums of tokens, in this order."""
    shared_TD = None if shared_expert_fn is None else shared_expert_fn()
    return tuple(addend for addend in (shared_TD, residual_TD) if addend is not None)
