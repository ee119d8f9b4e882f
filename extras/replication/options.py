"""Options of expert replication, their choice, and the contract of a transport that replicates.

The plan, and the ids of slots, are by `extras.replication.kernels.replication_plan`, the same for
every transport; weights and gradients are handled by `extras.replication.kernels.experts`. A
transport that replicates does, in `dispatch`:

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.configs.arithmetic.accounting import mlp_weights
from phalanx.configs.formats import width
from phalanx.configs.layout import expert_parallel_size
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import CPU_RANKS, Rates, rates_of
from phalanx.configs.tables.transports import (
    MAX_REPLICATED_EXPERTS,
    MAX_REPLICATION_RANKS,
    TRANSPORTS,
)
from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationPlan,
    ReplicationSize,
    replica_cost,
    route_to_replicas,
)
from phalanx.kernels.registry import Choice
from phalanx.parallel.dispatcher.transport_class import Transport

if TYPE_CHECKING:
    from phalanx.parallel.dispatcher.transport_class import Planner


@dataclass(frozen=True)
class ReplicationOptions:
    """Options of expert replication of a run, the same on all ranks."""

    slots: int  # number of replica slots of a rank
    cost: int  # rows that a copy costs its two ranks (`replication_plan.replica_cost`)
    keep: bool = False  # true if weights of replicas are saved for the backward pass, not resent
    least: int = 0  # rows by which copies must lower the largest load; otherwise there are none

    @property
    def cost_text(self) -> str:
        layer = f" and a layer with copies {self.least:,}" if self.least else ""
        return f"a copy costs {self.cost:,} rows{layer}"

    def size(self, ranks: int) -> ReplicationSize:
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
    """Costs of copies in a step, none of it hidden; `width` is of a sent weight, in bytes."""
    row_us = 6 * weights / (rates.expert_tflops * 1e6)
    return CopyCosts(copy_cost(rates, width=width, keep=keep), math.ceil(rates.copies_us / row_us))


def copy_cost(rates: Rates, *, width: int, keep: bool) -> int:
    """`ReplicationOptions.cost` of a step, with no part of the exchange hidden.

    A weight is sent to its replica, and resent for the backward pass if it is not saved, and its
    gradient returns in fp32; a row is 6 FLOP a weight in forward and backward. So the size of an
    expert cancels.
    """
    return replica_cost(
        (1 if keep else 2) * width + 4,
        bytes_per_second=rates.node_gbs * 1e9,
        seconds_per_row=6 / (rates.expert_tflops * 1e12),
    )


def plan_replicas(
    planner: "Planner", idx_NK: Tensor, experts: int, size: ReplicationSize
) -> tuple[ReplicationPlan, Tensor]:
    """Plan and slot of every pair, from ids of received rows, which are split in rank order."""
    plan, slot_NK = route_to_replicas(planner.by_rank(idx_NK), experts, size)
    return plan, planner.by_arrival(slot_NK)


def replicated(
    cfg: Config, transport: Transport, *, world: int, ranks: int, rates: Iterable[Rates]
) -> Transport:
    """The transport with the slots of a configuration; `with_replication` says when it cannot.

    `cfg` is valid on `world` ranks, with resolved `parallel.dispatch`; `ranks` share experts.
    `rates` are those of all devices, of which the slowest count.
    """
    keep, weights = cfg.parallel.save_x == "keep", mlp_weights(cfg.model, cfg.model.moe.ffn)
    costs = max(copy_costs(r, weights=weights, width=width(cfg), keep=keep) for r in rates)
    return with_replication(
        cfg.parallel.expert_replication,
        transport,
        ranks=ranks,
        local=cfg.model.moe.experts // expert_parallel_size(cfg, world),
        costs=costs,
        keep=keep,
    )


def with_replication(
    wanted: int | str, transport: Transport, *, ranks: int, local: int, costs: CopyCosts, keep: bool
) -> Transport:
    """The transport with `parallel.expert_replication`, a number of slots or `auto`.

    `ranks` share experts, `local` on each: of the group, or of each node with a transport inside
    nodes. With `keep` weights of replicas are saved for the backward pass.

    Raises:
        ValueError: the transport cannot replicate, or the group is too large.
    """
    facts = TRANSPORTS.get(transport.name)
    if wanted in (0, "auto") or ranks == 1:
        return transport
    if facts is None or not facts.replicates_experts:
        raise ValueError(
            f"parallel.expert_replication={wanted} cannot run: {transport.name} cannot replicate "
            "experts; set parallel.dispatch=auto or parallel.expert_replication=0"
        )
    if ranks > MAX_REPLICATION_RANKS or ranks * local > MAX_REPLICATED_EXPERTS:
        raise ValueError(
            f"parallel.expert_replication={wanted} serves {MAX_REPLICATED_EXPERTS} experts on "
            f"{MAX_REPLICATION_RANKS} ranks, "
            f"not {ranks * local} on {ranks}: set parallel.expert_replication=0"
        )
    replication = ReplicationOptions(int(wanted), costs.copy, keep, costs.any)
    if transport.inside is not None:
        return replace(transport, inside=replace(transport.inside, replication=replication))
    return replace(transport, replication=replication)


def replication_line(wanted: int | str, transport: Transport) -> Choice:
    """Line of `kernels.registry.table` on a transport that replicates experts."""
    options = (transport.inside or transport).replication
    assert isinstance(options, ReplicationOptions)
    kept = "saved for" if options.keep else "resent in"
    where = "; in each node by itself" if transport.inside else ""
    reason = f"parallel.expert_replication={wanted}{where}; {options.cost_text}; weights are {kept}"
    slots = f"{options.slots} slot{'s' * (options.slots > 1)}"
    return Choice("replication", slots, f"{reason} the backward pass")


class ReplicaCounts:
    """`parallel.dispatcher.transport_class.LoadCounts` of replication plans.

    Columns are copies, rows of all ranks, rows of the busiest rank without copies, and with them.
    Plans are read at a step's end, since plans of single nodes are compared over nodes, once for
    all layers and micro-batches.
    """

    name: ClassVar[str] = "replicas"
    columns: ClassVar[int] = 4

    def count(
        self, notes: Sequence[Sequence[ReplicationPlan]], group: dist.ProcessGroup
    ) -> list[Tensor]:
        """Counts of the plans of each layer, int64 [4].

        If a plan covers one node (`hier`), the ranks of the group agree on which rank of a
        micro-batch was the busiest, and each rank counts for the same local rank of all nodes.
        """
        plans = [plan for of_layer in notes for plan in of_layer]
        before_PR, after_PR = torch.stack([plan.load_2R for plan in plans], 1).long().unbind(0)
        copies_P = torch.stack([plan.expert_RN for plan in plans]).ge(0).sum((1, 2))
        busiest_2P = torch.stack((before_PR.amax(1), after_PR.amax(1)))
        nodes = group.size() // before_PR.shape[1]
        if nodes > 1:
            dist.all_reduce(busiest_2P, op=dist.ReduceOp.MAX, group=group)
        count_P4 = torch.stack((nodes * copies_P, nodes * before_PR.sum(1), *busiest_2P), 1)
        return [counts.sum(0) for counts in count_P4.split([len(of_layer) for of_layer in notes])]

    def values(self, counts: Tensor, micro_batches_L: Tensor, ranks: int) -> dict[str, float]:
        """Copies, and the load of the busiest rank without and with them; empty without copies.

        `replicas` are copies of experts, averaged over layers and micro-batches.
        `rank_load_without_replicas` are the rows of the busiest rank of a micro-batch over the mean
        of ranks, if it had no copies, averaged likewise. Another rank may be the busiest of the
        next micro-batch, so that this is at least `rank_load`. `rank_load_with_replicas` is its
        counterpart with the copies and their cost.
        """
        copies, total, before, after = counts.unbind(1)
        if not bool(total.any()):
            return {}
        # Each micro-batch by itself, not their sum.
        without, with_copies = (float((rows * ranks / total).mean()) for rows in (before, after))
        return {
            "replicas": float((copies / micro_batches_L).mean()),
            "rank_load_without_replicas": without,
            "rank_load_with_replicas": with_copies,
        }
