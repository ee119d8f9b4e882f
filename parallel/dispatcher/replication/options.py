"""Expert replication for a micro-batch: what a transport needs to know of them.

The plan is `kernels.routing.replication_plan`, the same for every transport, and so is what becomes
of ids (`kernels.routing.replica_routing`), of weights and of gradients
(`kernels.expert_mlp.replicas`). A transport that clones does, in `dispatch`:

1. Routing of all ranks comes first; the plan and the place of every pair are made of it.
2. Tokens travel to the ranks of their places, and weights of cloned experts to replica slots.
3. `Received.replicas` has the weights and takes gradients back.

In `combine` a token's rows of one home rank are added up as that rank would without replication: in
the order of slots in fp32, rounded once, and then the sums of home ranks in their order. So results
are those without replication bit for bit, wherever rows were computed, and so are gradients of
tokens and probabilities. Shapes depend on the number of slots alone; nothing is read on the host.

`hier` leaves all this to the transport inside a node, whose group is the node.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from phalanx.configs.machines import CPU_RANKS, Rates, rates_of
from phalanx.kernels.routing.replication_plan import ReplicationSize, replica_cost


@dataclass(frozen=True)
class ReplicationOptions:
    """Of every MoE layer of a run; the same on all ranks."""

    slots: int
    """Replicas of a rank at most."""
    cost: int
    """Rows that a copy costs its two ranks (`kernels.routing.replication_plan.replica_cost`)."""
    keep: bool = False
    """Weights of replicas are kept for the backward pass, not sent again."""
    least: int = 0
    """Rows by which copies must lower the largest load, or there are none."""

    @property
    def weighed(self) -> str:
        """What copies cost, in words."""
        layer = f" and a layer with copies {self.least:,}" if self.least else ""
        return f"a copy costs {self.cost:,} rows{layer}"

    def size(self, ranks: int) -> ReplicationSize:
        """What plans are made for among ranks that share experts."""
        return ReplicationSize(ranks, self.slots, self.cost, least=self.least)


def rates_on(device: torch.device, otherwise: str) -> Rates:
    """Of a device; of the machine `otherwise` if it is a GPU that configs/machines.py lacks."""
    if device.type != "cuda":
        return CPU_RANKS
    return rates_of(torch.cuda.get_device_name(device), otherwise)


class CopyCosts(NamedTuple):
    """Of copies in a step, in rows: `ReplicationOptions.cost` and `ReplicationOptions.least`."""

    copy: int
    any: int


def copy_costs(rates: Rates, *, weights: int, width: int, keep: bool) -> CopyCosts:
    """Those of a whole step, in which nothing hides what is sent.

    Args:
        rates: of a GPU.
        weights: numbers in an expert.
        width: bytes of a weight on its way.
        keep: replicas' weights are kept for the backward pass.
    """
    row_us = 6 * weights / (rates.expert_tflops * 1e6)
    return CopyCosts(copy_cost(rates, width=width, keep=keep), math.ceil(rates.copies_us / row_us))


def copy_cost(rates: Rates, *, width: int, keep: bool) -> int:
    """`ReplicationOptions.cost` of a whole step, in which nothing hides what is sent.

    A weight travels to its replica, once more for the backward pass if it is not kept, and its
    gradient back in fp32; a row is 6 FLOP a weight in forward and backward. So the size of an
    expert cancels.

    Args:
        rates: of a GPU.
        width: bytes of a weight on its way.
        keep: replicas' weights are kept for the backward pass.
    """
    return replica_cost(
        (1 if keep else 2) * width + 4,
        bytes_per_second=rates.node_gbs * 1e9,
        seconds_per_row=6 / (rates.expert_tflops * 1e12),
    )
