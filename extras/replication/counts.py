"""Counts of replicas in the load statistics of layers.

Plans are read at a step's end, since plans of single nodes are compared over nodes, once for all
layers and micro-batches.

Legend: P plans of a step, R ranks of a plan.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.replication.kernels.replication_plan import ReplicationPlan


class ReplicaCounts:
    """`parallel.dispatcher.received.LoadCounts` of replication plans.

    Columns are copies, rows of all ranks, rows of the busiest rank without copies, and with them.
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
