"""Interface of a transport: its sends and receives, the reasons that it cannot run, its costs.

A new transport is a subclass of `Dispatcher` and an entry that names it in
`configs.tables.transports`.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N received rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.tables.backends import EXPERT_BACKENDS
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.refusal import Refusal
from phalanx.parallel.connections import Connections
from phalanx.parallel.dispatcher.capacity import Budget
from phalanx.parallel.dispatcher.collectives import IN_TURN, Collectives, Group, Passes
from phalanx.parallel.dispatcher.costs import GroupTopology, TransportCosts
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.nodes import Nodes
from phalanx.parallel.dispatcher.received import LoadCounts, Planner, Received
from phalanx.parallel.dispatcher.sampling import TopKSampling


class Replication(Protocol):
    """Options of expert replication, which the class of `TransportFacts.replicated` knows."""

    @property
    def slots(self) -> int:
        """Number of replica slots of a rank."""
        ...


@dataclass(frozen=True)
class Transport:
    """Transport of an expert-parallel group, the same on all of its ranks."""

    name: str  # key of `configs.tables.transports.TRANSPORTS`; or `megatron`, Megatron-Core's own
    reason: str  # reason for the choice, in clauses separated by semicolons
    inside: "Transport | None" = None  # transport inside nodes, of a transport between nodes
    nodes: Nodes | None = None
    """Process groups of a transport with one inside; a plan does not create them."""
    replication: Replication | None = None  # options of expert replication; None: no replication
    passes: Passes = IN_TURN  # process groups and exchanges of forward and backward passes
    group: Group | None = None
    """Process groups of its collectives by `passes`, where passes of two micro-batches run beside
    each other; None: that of its ranks."""

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
    refusals: Mapping[str, Refusal] = {}
    """Reason that it cannot serve, by the names of the transports in question."""


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
    recipe: Fp8Block | None = None
    """Recipe of tokens and gradients of sums that travel in FP8; None: they travel as they are."""
    connections: Connections | None = None
    """Memory that this process shares with other ranks, for transports that need some."""
    quantizes: bool = False
    """True if the experts quantise received rows, for which all of them must have arrived."""
    budget: Budget | None = None  # budget of rows, for transports that size blocks between nodes
    sampling: TopKSampling | None = None
    """Choice of a token's experts, from which the balanced load of these blocks follows."""

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
    sends_back: ClassVar[bool] = True
    """True if sums travel to the ranks of their tokens; else this rank's sums are complete."""
    splits_shared_experts: ClassVar[bool] = True
    """True if shared experts compute fc1 while tokens are in flight, and fc2 while sums are; else
    both while sums are, so that all of their backward pass runs beside the gradients of sums."""
    bf16_only: ClassVar[bool] = False  # true if it moves tokens in bf16 only
    load_counts: ClassVar[LoadCounts | None] = None
    """Counts of `Received.statistics`; None: there are none."""

    @classmethod
    @abstractmethod
    def build(cls, context: DispatchContext) -> "Dispatcher":
        """Build the transport of one MoE layer."""

    @classmethod
    def refuse_here(cls, dtype: torch.dtype) -> Refusal:
        """Reason that this rank cannot serve, or None; it never raises.

        The reason of one rank holds for its group. It is evaluated if the transport is requested by
        name, and for `auto`.

        Args:
            dtype: dtype of the tokens.
        """
        return None

    @classmethod
    def refuse_dtype(cls, dtype: torch.dtype) -> Refusal:
        """Reason that it cannot move tokens of a dtype on any machine, or None: for estimates."""
        refused = cls.bf16_only and dtype != torch.bfloat16
        return f"moves bf16, not {dtype}" if refused else None

    @classmethod
    def refuse(cls, ranks: Sequence[Rank]) -> Refusal:
        """Reason that a group cannot be served although each of its ranks could be, or None.

        Args:
            ranks: ranks of the group, in their order.
        """
        return "needs several ranks" if len(ranks) == 1 else None

    @classmethod
    @abstractmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        """Rows that it sends and holds, for estimates."""

    @abstractmethod
    def send_tokens(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Any:
        """Start to send tokens to the ranks of their experts.

        Args:
            x_TD: tokens, bf16 or fp32.
            topk_idx_TK: expert ids, int32; -1 is no expert.
            topk_prob_TK: probabilities, fp32.

        Returns:
            The argument of `receive_tokens`.
        """

    @abstractmethod
    def receive_tokens(self, sent: Any) -> Received:
        """Plan the experts' rows, and wait for tokens unless the experts' kernels do."""

    def send_sums(self, out_ND: Tensor, received: Received, *, alone: bool = True) -> Any:
        """Start to send the experts' output to the ranks of its tokens.

        Args:
            out_ND: output of the experts.
            received: their input, as `receive_tokens` returned it.
            alone: no other kernel runs before `receive_sums`.

        Returns:
            The argument of `receive_sums`: by default the output, which that sends.
        """
        return out_ND

    @abstractmethod
    def receive_sums(self, sent: Any, received: Received, addends: Sequence[Tensor] = ()) -> Tensor:
        """Sum over ranks in fp32, and add `addends` [T, D] in their order.

        Returns:
            [T, D] in the dtype of the experts' output. On GPUs the sum over ranks and addends is
            rounded once; on one rank, and on a CPU, each addition is rounded.
        """

    def dispatch(self, x_TD: Tensor, topk_idx_TK: Tensor, topk_prob_TK: Tensor) -> Received:
        """Send and receive tokens, with no work in between."""
        return self.receive_tokens(self.send_tokens(x_TD, topk_idx_TK, topk_prob_TK))

    def combine(self, out_ND: Tensor, received: Received, *addends: Tensor) -> Tensor:
        """Send and receive sums, with no work in between."""
        return self.receive_sums(self.send_sums(out_ND, received), received, addends)


def waits_for_tokens(backend: str, quantizes: bool = False) -> bool:
    """True if the kernels of an expert backend can start with the tokens that have arrived.

    Args:
        backend: backend of the experts.
        quantizes: the experts quantise received tokens, for which all of them must have arrived.
    """
    return EXPERT_BACKENDS[backend].waits_for_rows and not quantizes


def one_for_all(ranks: Sequence[Rank], name: str) -> Refusal:
    """Reason of the first rank that refuses, for its group, with the rank unless all agree."""
    reasons = [rank.refusals.get(name) for rank in ranks]
    if len(set(reasons)) == 1:
        return reasons[0]
    refusing = [rank for rank in ranks if rank.refusals.get(name)]
    first, more = refusing[0], f" and {len(refusing) - 1} more" if len(refusing) > 1 else ""
    return f"{first.refusals[name]} (rank {first.number} on {first.host}{more})"
