"""Rows that a transport delivers to the experts of a rank, and the planner of these rows.

Legend: D hidden, N received rows, T tokens of a rank, K expert ids of a token.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.expert_mlp.autograd import OWN, Experts, Fp8Inputs, Overlap
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan


class Received(NamedTuple):
    """Input of the experts of a rank."""

    rows_ND: Tensor
    """Received tokens, rank-major (`hier` has other rows). Rows that `plan` does not name are
    undefined, never read."""
    plan: ExpertPlan  # rows that each local expert reads
    overlap: Overlap | None = None
    """Exchanges that overlap the experts, whose kernels wait for rows; None: all have arrived."""
    fp8_inputs: Fp8Inputs | None = None
    """Received rows in FP8, while `rows_ND` is without data; None: `rows_ND` has the data."""
    route: Any = None  # state of the transport that its `combine` needs
    saving: Callable[[], AbstractContextManager] = nullcontext
    """Context in which rows are saved for backward: they may be in a buffer that is reused."""
    stays: bool = False
    """The rows, and in the backward pass the gradient of the sums, are in memory of their own, not
    in a buffer that the next exchange takes: weight gradients may read them later."""
    experts: Experts = OWN
    """Experts of `plan`: this rank's own alone, or others whose slots follow theirs."""
    statistics: Any = None
    """Note on this micro-batch for the transport's `LoadCounts`; None: nothing is counted."""


class LoadCounts(Protocol):
    """Counts that a transport adds to the load statistics of its layers.

    Layers collect `Received.statistics` of the micro-batches of a step, and its end counts them.
    """

    @property
    def name(self) -> str:
        """Name of the buffer of these counts in a layer's statistics."""
        ...

    @property
    def columns(self) -> int:
        """Number of counts of a layer."""
        ...

    def count(self, notes: Sequence[Sequence[Any]], group: dist.ProcessGroup) -> Sequence[Tensor]:
        """Counts of a step, int64 [columns] for each layer.

        Args:
            notes: those of the micro-batches of each layer.
            group: the expert-parallel group, over which this may be collective.
        """
        ...

    def values(self, counts: Tensor, micro_batches_L: Tensor, ranks: int) -> Mapping[str, float]:
        """Logged values by name.

        Args:
            counts: sum of the counts of all ranks, fp64 [layers, columns].
            micro_batches_L: number of micro-batches of each layer, on all ranks.
            ranks: number of ranks of the expert-parallel group.
        """
        ...


class Planner(Protocol):
    """Planner of the experts of this rank, within the budget of rows."""

    def check(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> None:
        """Raise ValueError for tokens and routing that do not fit the plan."""
        ...

    def __call__(
        self, topk_idx_NK: Tensor, topk_prob_NK: Tensor, tokens: int | None = None
    ) -> ExpertPlan:
        """Plan of the received rows from their routing.

        Args:
            topk_idx_NK: int32 expert ids, or slots.
            topk_prob_NK: fp32.
            tokens: number of tokens of a rank; None: all of them are received, T = N / R.
        """
        ...

    def by_rank(self, rows: Tensor) -> Tensor:
        """Received rows [N, ...] in the order of ranks, in which plans count them."""
        ...

    def by_arrival(self, rows: Tensor) -> Tensor:
        """Rows [N, ...] in the order of ranks as they are received."""
        ...
