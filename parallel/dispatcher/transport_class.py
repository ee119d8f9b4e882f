"""Interface of a transport: its sends and receives, the reasons that it cannot run, its costs.

A new transport is a subclass of `Dispatcher` and an entry in `configs.tables.transports`.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N received rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.interfaces import OWN, Experts, Fp8Inputs, Overlap
from phalanx.kernels.limits import Refusal
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.collectives import IN_TURN, Collectives, Group, Passes
from phalanx.parallel.dispatcher.costs import GroupTopology, TopKSampling, TransportCosts
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.nodes import Nodes


class Received(NamedTuple):
    """Input of the experts of a rank."""

    rows_ND: Tensor  # rank-major, but for `hier`; rows that `plan` does not name are undefined
    plan: ExpertPlan  # rows that each local expert reads
    overlap: Overlap | None = None  # exchanges beside the experts; None: all rows have arrived
    fp8_inputs: Fp8Inputs | None = None  # rows in FP8; `rows_ND` is then without data
    route: Any = None  # state of the transport that its `combine` needs
    saving: Callable[[], AbstractContextManager] = nullcontext
    """Context in which rows are saved for backward: they may be in a buffer that is reused."""
    inputs_persist: bool = False
    """Rows and gradient of the sums are in memory of their own, not in a buffer that the next
    exchange takes: weight gradients may read them later."""
    experts: Experts = OWN  # of `plan`: this rank's own, or others whose slots follow
    statistics: Any = None  # note for the transport's `LoadCounts`, if any


class LoadCounts(Protocol):
    """Counts that a transport adds to the load statistics of its layers, at the end of a step."""

    @property
    def name(self) -> str: ...

    @property
    def columns(self) -> int: ...

    def count(self, notes: Sequence[Sequence[Any]], group: dist.ProcessGroup) -> Sequence[Tensor]:
        """Counts of a step, int64 [columns] for each layer, from notes of its micro-batches.

        It may be collective over the expert-parallel `group`.
        """
        ...

    def values(self, counts: Tensor, micro_batches_L: Tensor, ranks: int) -> Mapping[str, float]:
        """Logged values by name.

        `counts` are summed over all ranks, fp64 [layers, columns]; `micro_batches_L` are those of
        each layer on all ranks; `ranks` those of the expert-parallel group.
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
        """Plan of the received rows from their routing, int32 and fp32.

        `tokens` of a rank; None: all of them are received, T = N / R.
        """
        ...

    def by_rank(self, rows: Tensor) -> Tensor:
        """Received rows [N, ...] in the order of ranks, in which plans count them."""
        ...

    def by_arrival(self, rows: Tensor) -> Tensor:
        """Rows [N, ...] in the order of ranks as they are received."""
        ...


class Replication(Protocol):
    """Options of expert replication, which the class of `TransportFacts.replicated` knows."""

    @property
    def slots(self) -> int: ...


@dataclass(frozen=True)
class Transport:
    """Transport of an expert-parallel group, the same on all of its ranks."""

    name: str  # key of `configs.tables.transports.TRANSPORTS`; or `megatron`, Megatron-Core's own
    reason: str  # reason for the choice, in clauses separated by semicolons
    inside: "Transport | None" = None  # transport inside nodes, of a transport between nodes
    nodes: Nodes | None = None  # of a transport with one inside; a plan creates none
    replication: Replication | None = None  # options of expert replication; None: no replication
    passes: Passes = IN_TURN  # process groups and exchanges of forward and backward passes
    group: Group | None = None
    """Process groups of its collectives, where passes run beside each other; None: of its ranks."""

    @property
    def replica_slots(self) -> int:
        """Number of replica slots of a rank, in this transport or in the one inside nodes."""
        replication = (self.inside or self).replication
        return 0 if replication is None else replication.slots


class Rank(NamedTuple):
    """Facts of one rank that the choice of a transport depends on."""

    number: int  # number of the rank in the job
    host: str
    node: str
    refusals: Mapping[str, Refusal] = {}  # by the names of the transports in question


class DispatchContext(NamedTuple):
    """Arguments from which the transport of an MoE layer is built."""

    transport: Transport
    group: dist.ProcessGroup  # the expert-parallel group
    plan: Planner  # planner, which checks sent tokens and plans received ones within the budget
    experts: int  # number of experts of all ranks
    local: int  # number of experts of this rank
    local_slots: int  # number of expert slots of a rank in plans: `local`, or more with replicas
    backend: str  # backend of the experts and of `kernels.routing.plan`
    options: SymmOptions = SymmOptions()
    recipe: Fp8Block | None = None  # of rows that travel in FP8; None: as they are
    connections: Connections | None = None  # memory shared with other ranks
    quantizes: bool = False  # experts quantise received rows, once all have arrived
    budget: Budget | None = None  # budget of rows, for transports that size blocks between nodes
    sampling: TopKSampling | None = None  # by which blocks between nodes are balanced

    @property
    def waits(self) -> bool:
        """True if the experts' kernels can start with the tokens that have arrived."""
        return waits_for_tokens(self.backend, self.quantizes)

    def collectives(self, group: dist.ProcessGroup) -> Collectives:
        """Collectives of the transport, over `group` unless passes have groups of their own."""
        chosen = self.transport
        return Collectives(chosen.group or (lambda: group), beside=chosen.group is not None)


class Dispatcher(ABC):
    """A transport between tokens and experts, without state between calls."""

    no_overlap: ClassVar[Refusal] = "cannot overlap"
    """Reason that experts cannot run while rows are in flight; None: they can, if kernels wait."""
    sends_back: ClassVar[bool] = True  # sums travel to their tokens' ranks; else they are complete
    splits_shared_experts: ClassVar[bool] = True
    """Shared experts compute fc1 while tokens are in flight, and fc2 while sums are; else both
    while sums are: all of their backward pass is beside the gradients of sums."""
    bf16_only: ClassVar[bool] = False  # true if it moves tokens in bf16 only
    load_counts: ClassVar[LoadCounts | None] = None  # of `Received.statistics`, if any

    @classmethod
    @abstractmethod
    def build(cls, context: DispatchContext) -> "Dispatcher": ...

    @classmethod
    def refuse_here(cls, dtype: torch.dtype) -> Refusal:
        """Reason that this rank, hence its group, cannot serve a dtype, or None; never raises."""
        return None

    @classmethod
    def refuse_dtype(cls, dtype: torch.dtype) -> Refusal:
        """Reason that it cannot move tokens of a dtype on any machine, or None: for estimates."""
        refused = cls.bf16_only and dtype != torch.bfloat16
        return f"moves bf16, not {dtype}" if refused else None

    @classmethod
    def refuse(cls, ranks: Sequence[Rank]) -> Refusal:
        """Reason that a group cannot be served although each of its ranks could be, or None."""
        return "needs several ranks" if len(ranks) == 1 else None

    @classmethod
    @abstractmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts: ...

    @abstractmethod
    def send_tokens(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Any:
        """Start to send tokens to the ranks of their experts; returns what `receive_tokens` takes.

        Args:
            x_TD: tokens, bf16 or fp32.
            topk_idx_TK: expert ids, int32; -1 is no expert.
            topk_prob_TK: probabilities, fp32.
        """

    @abstractmethod
    def receive_tokens(self, sent: Any) -> Received:
        """Plan the experts' rows, and wait for tokens unless the experts' kernels do."""

    def send_sums(self, out_ND: Tensor, received: Received, *, alone: bool = True) -> Any:
        """Start to send the experts' output to the ranks of its tokens; see `receive_sums`.

        By default it is returned for that to send. `alone`: no other kernel runs before it.
        """
        return out_ND

    @abstractmethod
    def receive_sums(self, sent: Any, received: Received, addends: Sequence[Tensor] = ()) -> Tensor:
        """Sum over ranks in fp32, and add `addends` in order: [T, D] in the output's dtype.

        On GPUs the sum over ranks and addends is rounded once; on one rank, and on a CPU, each
        addition is rounded.
        """

    def dispatch(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Received:
        return self.receive_tokens(self.send_tokens(x_TD, topk_idx_TK, topk_prob_TK))

    def combine(self, out_ND: Tensor, received: Received, *addends: Tensor) -> Tensor:
        return self.receive_sums(self.send_sums(out_ND, received), received, addends)


def waits_for_tokens(backend: str, quantizes: bool = False) -> bool:
    """True if the kernels of an expert backend can start with the tokens that have arrived.

    Not if the experts quantise them (`quantizes`), for which all must have arrived.
    """
    return EXPERT_BACKENDS[backend].waits_for_rows and not quantizes


def refusal_of_any_rank(ranks: Sequence[Rank], name: str) -> Refusal:
    """Reason of the first rank that refuses, for its group, with the rank unless all agree."""
    reasons = [rank.refusals.get(name) for rank in ranks]
    if len(set(reasons)) == 1:
        return reasons[0]
    refusing = [rank for rank in ranks if rank.refusals.get(name)]
    first, more = refusing[0], f" and {len(refusing) - 1} more" if len(refusing) > 1 else ""
    return f"{first.refusals[name]} (rank {first.number} on {first.host}{more})"
