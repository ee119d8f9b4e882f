"""Interface of a transport: `dispatch` and `combine`, the reasons that it cannot run, its costs.

A new transport is a subclass of `Dispatcher` and an entry that names it in `configs.transports`.

Legend: T tokens per rank, D hidden, K expert ids of a token, R ranks, N received rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.kernels.refusal import Refusal
from phalanx.parallel.dispatcher.costs import GroupTopology, TransportCosts
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.nodes import Nodes
from phalanx.parallel.dispatcher.received import OverlapFn, Planner, Received, SharedExpertFn
from phalanx.parallel.dispatcher.replication.options import ReplicationOptions


@dataclass(frozen=True)
class Transport:
    """Transport of an expert-parallel group, the same on all of its ranks."""

    name: str
    """Key of `configs.transports.TRANSPORTS`; or `megatron`, which is Megatron-Core's own."""
    reason: str
    """Reason for the choice, in clauses separated by semicolons."""
    inside: "Transport | None" = None
    """Transport inside nodes, of a transport between nodes."""
    nodes: Nodes | None = None
    """Process groups of a transport with one inside; `planned` does not create them."""
    replication: ReplicationOptions | None = None
    """Options of expert replication; None: no replication."""


class Rank(NamedTuple):
    """Facts of one rank that the choice of a transport depends on."""

    number: int
    """Number of the rank in the job."""
    host: str
    node: str
    refusals: Mapping[str, Refusal] = {}
    """Reason that it cannot serve, by the names of the transports in question."""


class DispatchContext(NamedTuple):
    """Arguments from which the transport of an MoE layer is built."""

    transport: Transport
    group: dist.ProcessGroup
    """The expert-parallel group."""
    plan: Planner
    """Planner, which checks sent tokens and plans received ones within the budget."""
    experts: int
    """Number of experts of all ranks."""
    local: int
    """Number of experts of this rank."""
    backend: str
    """Backend of the experts and of `kernels.routing.plan`."""
    options: SymmOptions = SymmOptions()
    recipe: Fp8Block | None = None
    """Recipe of tokens and gradients of sums that travel in FP8; None: they travel as they are."""
    quantizes: bool = False
    """True if the experts quantise received rows, for which all of them must have arrived."""

    @property
    def waits(self) -> bool:
        """True if the experts' kernels can start with the tokens that have arrived."""
        return waits_for_tokens(self.backend, self.quantizes)


class Dispatcher(ABC):
    """A transport between tokens and experts, without state between calls."""

    no_overlap: ClassVar[Refusal] = "cannot overlap"
    """Reason that experts cannot run while rows are in flight; None: they can, if kernels wait."""
    sends_back: ClassVar[bool] = True
    """True if sums travel to the ranks of their tokens; else this rank's sums are complete."""
    bf16_only: ClassVar[bool] = False
    """True if it moves tokens in bf16 only."""

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
    def asks(cls) -> tuple[str, ...]:
        """Transports inside a node whose `refuse_here` the choice of `inside` needs."""
        return ()

    @classmethod
    def inside(cls, ranks: Sequence[Rank]) -> Transport | None:
        """Intra-node transport, for which process groups of nodes are created, or None."""
        return None

    @classmethod
    @abstractmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        """Rows that it sends and holds, for estimates."""

    @abstractmethod
    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        overlap_fn: OverlapFn = None,
    ) -> Received:
        """Send tokens (bf16 or fp32), expert ids (int32) and probabilities (fp32) to experts.

        Args:
            x_TD, topk_idx_TK, topk_prob_TK: tokens and routing; the id -1 is no expert.
            overlap_fn: function called once, while rows are in flight if the transport overlaps.
        """

    @abstractmethod
    def combine(
        self,
        out_ND: Tensor,
        received: Received,
        shared_expert_fn: SharedExpertFn = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        """Return the experts' outputs to the tokens' ranks, and sum over ranks in fp32.

        Args:
            out_ND: output of the experts.
            received: their input, as `dispatch` returned it.
            shared_expert_fn: function of an addend [T, D], called while rows are in flight if the
                transport overlaps.
            residual_TD: addend after that.

        Returns:
            [T, D] in out's dtype. On GPUs the sum over ranks and addends is rounded once (not by
            `deepep`); on one rank, and on a CPU, each addition is rounded.
        """


def waits_for_tokens(backend: str, quantizes: bool = False) -> bool:
    """True if the kernels of an expert backend can start with the tokens that have arrived.

    Args:
        backend: backend of the experts.
        quantizes: the experts quantise received tokens, for which all of them must have arrived.
    """
    return backend == "fused" and not quantizes


def one_for_all(ranks: Sequence[Rank], name: str) -> Refusal:
    """Reason of the first rank that refuses, for its group, with the rank unless all agree."""
    reasons = [rank.refusals.get(name) for rank in ranks]
    if len(set(reasons)) == 1:
        return reasons[0]
    refusing = [rank for rank in ranks if rank.refusals.get(name)]
    first, more = refusing[0], f" and {len(refusing) - 1} more" if len(refusing) > 1 else ""
    return f"{first.refusals[name]} (rank {first.number} on {first.host}{more})"
