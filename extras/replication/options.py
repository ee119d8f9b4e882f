"""Options of expert replication, and the contract of a transport that replicates.

The plan is `extras.replication.kernels.replication_plan`, the same for every transport; ids are
mapped by `extras.replication.kernels.replica_routing`, weights and gradients handled by
`extras.replication.kernels.experts`. A transport that replicates does, in `dispatch`:

1. It exchanges the routing of all ranks, and computes the plan and the expert slot of every pair.
2. It sends tokens to the ranks of their slots, and weights of replicated experts to replica slots.
3. It returns `Received.experts`, which have the weights and reduce gradients.

In `combine` a token's rows of one owner are added as that rank would without replication: in the
order of expert ids in fp32, rounded once, and then the sums of owners in their order. So results
are those without replication bit for bit, wherever rows were computed, and so are gradients of
tokens and probabilities. Shapes depend on the number of slots alone; nothing is read on the host.

With `hier` the transport inside a node replicates, and its group is the node: neither weights nor
plans pass the network.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from phalanx.configs.tables.machines import CPU_RANKS, Rates, rates_of
from phalanx.extras.replication.kernels.replica_routing import route_to_replicas
from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationPlan,
    ReplicationSize,
    replica_cost,
)

if TYPE_CHECKING:
    from phalanx.parallel.dispatcher.received import Planner


@dataclass(frozen=True)
class ReplicationOptions:
    """Options of expert replication of a run, the same on all ranks."""

    slots: int  # number of replica slots of a rank
    cost: int  # rows that a copy costs its two ranks (`replication_plan.replica_cost`)
    keep: bool = False  # true if weights of replicas are saved for the backward pass, not resent
    least: int = 0  # rows by which copies must lower the largest load; otherwise there are none

    @property
    def cost_text(self) -> str:
        """Costs of copies as a clause of the start page."""
        layer = f" and a layer with copies {self.least:,}" if self.least else ""
        return f"a copy costs {self.cost:,} rows{layer}"

    def size(self, ranks: int) -> ReplicationSize:
        """Size of plans of a number of ranks that share experts."""
        return ReplicationSize(ranks, self.slots, self.cost, least=self.least)


def rates_on(device: torch.device, otherwise: str) -> Rates:
    """Rates of a device, or of `otherwise` for a GPU that configs/tables/machines.py lacks."""
    if device.type != "cuda":
        return CPU_RANKS
    return rates_of(torch.cuda.get_device_name(device), otherwise)


class CopyCosts(NamedTuple):
    """Costs of copies in a step, in rows: `ReplicationOptions.cost` and `least`."""

    copy: int
    any: int


def copy_costs(rates: Rates, *, weights: int, width: int, keep: bool) -> CopyCosts:
    """Costs of copies in a step, with no part of the exchange hidden.

    Args:
        rates: rates of a GPU.
        weights: number of weights of an expert.
        width: bytes of a sent weight.
        keep: True if weights of replicas are saved for the backward pass.
    """
    row_us = 6 * weights / (rates.expert_tflops * 1e6)
    return CopyCosts(copy_cost(rates, width=width, keep=keep), math.ceil(rates.copies_us / row_us))


def copy_cost(rates: Rates, *, width: int, keep: bool) -> int:
    """`ReplicationOptions.cost` of a step, with no part of the exchange hidden.

    A weight is sent to its replica, and resent for the backward pass if it is not saved, and its
    gradient returns in fp32; a row is 6 FLOP a weight in forward and backward. So the size of an
    expert cancels.

    Args:
        rates: rates of a GPU.
        width: bytes of a sent weight.
        keep: True if weights of replicas are saved for the backward pass.
    """
    return replica_cost(
        (1 if keep else 2) * width + 4,
        bytes_per_second=rates.node_gbs * 1e9,
        seconds_per_row=6 / (rates.expert_tflops * 1e12),
    )


def plan_replicas(
    planner: "Planner", idx_NK: Tensor, experts: int, size: ReplicationSize
) -> tuple[ReplicationPlan, Tensor]:
    """Plan of a micro-batch, and the slot of every pair, from the ids of received rows.

    An expert's rows are split in the order of ranks, so that parts keep its blocks of FP8.
    """
    plan, slot_NK = route_to_replicas(planner.by_rank(idx_NK), experts, size)
    return plan, planner.by_arrival(slot_NK)
