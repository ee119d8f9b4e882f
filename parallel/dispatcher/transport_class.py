"""What the class of a transport has: `dispatch` and `combine`, why it cannot run, and its costs.

A new transport is a subclass of `Dispatcher` and an entry that names it in `configs.transports`.

Legend: T tokens per rank, D hidden, K slots for experts of a token, R ranks, N received rows.
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
    """What an expert-parallel group takes, the same on all of its ranks."""

    name: str
    """Of `configs.transports.TRANSPORTS`; or `megatron`, which is Megatron-Core's own."""
    reason: str
    """Clauses, separated by semicolons."""
    inside: "Transport | None" = None
    """The transport inside nodes, of one that goes over nodes itself."""
    nodes: Nodes | None = None
    """Process groups of one that has a transport inside, which `planned` does not make."""
    replication: ReplicationOptions | None = None
    """Of hot experts; None: there are none."""


class Rank(NamedTuple):
    """What the choice depends on, of one rank."""

    number: int
    """In the job."""
    host: str
    node: str
    refusals: Mapping[str, Refusal] = {}
    """Why it cannot serve, by the name of the transport: of those that are asked about."""


class DispatchContext(NamedTuple):
    """What a transport is built from, in every MoE layer."""

    transport: Transport
    group: dist.ProcessGroup
    """Expert-parallel."""
    plan: Planner
    """Checks what leaves, and plans what has arrived within the budget of expert rows."""
    experts: int
    """Of all ranks."""
    local: int
    """Of this rank."""
    backend: str
    """Of the experts and of `kernels.routing.plan`."""
    options: SymmOptions = SymmOptions()
    recipe: Fp8Block | None = None
    """Of tokens and gradients of sums that travel in FP8; None: they travel as they are."""
    quantizes: bool = False
    """The experts make FP8 of rows that have come as they were, for which all must be there."""

    @property
    def waits(self) -> bool:
        """Whether the experts' kernels can begin with the tokens that are there."""
        return waits_for_tokens(self.backend, self.quantizes)


class Dispatcher(ABC):
    """A transport between tokens and experts. An object keeps no state between calls."""

    no_overlap: ClassVar[Refusal] = "cannot overlap"
    """Why the experts cannot work while rows are on their way. None: they can, if their kernels
    wait for rows."""
    sends_back: ClassVar[bool] = True
    """Sums of experts travel to the ranks of their tokens; if not, those of this rank are all."""
    bf16_only: ClassVar[bool] = False
    """It moves tokens in bf16 alone."""

    @classmethod
    @abstractmethod
    def build(cls, context: DispatchContext) -> "Dispatcher":
        """That of one MoE layer."""

    @classmethod
    def refuse_here(cls, dtype: torch.dtype) -> Refusal:
        """Why this rank cannot serve, whoever the others are; it never raises.

        The reason of one rank is that of its group. It is asked where the transport is wanted by
        name, and for `auto`.

        Args:
            dtype: of tokens.
        """
        return None

    @classmethod
    def refuse_dtype(cls, dtype: torch.dtype) -> Refusal:
        """Why it cannot move tokens of a dtype, wherever it runs: for estimates."""
        refused = cls.bf16_only and dtype != torch.bfloat16
        return f"moves bf16, not {dtype}" if refused else None

    @classmethod
    def refuse(cls, ranks: Sequence[Rank]) -> Refusal:
        """Why a group cannot be served although each of its ranks could serve.

        Args:
            ranks: of the group, in their order.
        """
        return "needs several ranks" if len(ranks) == 1 else None

    @classmethod
    def asks(cls) -> tuple[str, ...]:
        """Transports inside a node whose `refuse_here` the choice of `inside` looks at."""
        return ()

    @classmethod
    def inside(cls, ranks: Sequence[Rank]) -> Transport | None:
        """What it takes inside nodes, whose process groups it gets; None: it asks for no nodes."""
        return None

    @classmethod
    @abstractmethod
    def costs(cls, reach: GroupTopology) -> TransportCosts:
        """What it sends and holds, for estimates."""

    @abstractmethod
    def dispatch(
        self,
        x_TD: Tensor,
        topk_idx_TK: Tensor,
        topk_prob_TK: Tensor,
        overlap_fn: OverlapFn = None,
    ) -> Received:
        """Bring tokens (bf16 or fp32), expert ids (int32) and probabilities (fp32) to experts.

        Args:
            x_TD, topk_idx_TK, topk_prob_TK: a slot without an expert has the id -1.
            meanwhile: is called once, while rows are on their way if the transport can.
        """

    @abstractmethod
    def combine(
        self,
        out_ND: Tensor,
        received: Received,
        beside: SharedExpertFn = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        """Bring what a rank's experts made of received rows back, and add ranks up in fp32.

        Args:
            out_ND: of the experts.
            received: what they worked on.
            beside: makes more to add, while rows are on their way if the transport can.
            residual_TD: to be added after that.

        Returns:
            [T, D] in out's dtype. On GPUs ranks' sums and what is added are rounded once (not by
            `deepep`); where there is one rank, and on a CPU, additions follow one another.
        """


def waits_for_tokens(backend: str, quantizes: bool = False) -> bool:
    """Whether the kernels of an expert backend can begin with the tokens that are there.

    Args:
        backend: of the experts.
        quantizes: they make FP8 of tokens that come in bf16, for which all must be there.
    """
    return backend == "fused" and not quantizes


def one_for_all(ranks: Sequence[Rank], name: str) -> Refusal:
    """The reason of one rank is that of all. Whose it is, unless all have the same."""
    reasons = [rank.refusals.get(name) for rank in ranks]
    if len(set(reasons)) == 1:
        return reasons[0]
    have = [rank for rank in ranks if rank.refusals.get(name)]
    more = f" and {len(have) - 1} more" if len(have) > 1 else ""
    return f"{have[0].refusals[name]} (rank {have[0].number} on {have[0].host}{more})"
