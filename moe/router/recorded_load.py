"""How evenly a recorded routing loads experts and ranks, and how many expert rows it needs, with
expert replication and without: what a run logs, counted on a CPU before there is a run.

The recorded tokens are one step. Micro-batch m of an expert-parallel group has R * T of them in
order, from token m * R * T on, and after the last one the first again, as in `moe.router.replay`,
which runs the first micro-batch again and again. What is left behind the last whole micro-batch is
not counted. Plans of replicas and the budget of rows are those of the transports.

Legend: N tokens recorded, K experts per token, M micro-batches, T tokens of a rank, R ranks, E
experts, L = E / R of a rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from statistics import mean

import numpy as np
import torch
from torch import Tensor

from phalanx.configs.knobs import pluralize
from phalanx.kernels.routing.replication_plan import ReplicationPlan, make_replication_plan
from phalanx.moe.router.recording import Ids
from phalanx.parallel.dispatcher.capacity import ROW_MULTIPLE, Budget
from phalanx.parallel.dispatcher.replication.options import ReplicationOptions


@dataclass(frozen=True)
class LayerLoad:
    """Of one layer."""

    load_max: float
    """Tokens of the busiest expert over the mean, in the whole step."""
    busiest_rank: float
    """Rows of the busiest rank over the mean, of micro-batches one by one, on average, with copies
    and what they cost: the `rank_load_with_replicas` of a run, without copies its
    `rank_load_without_replicas`."""
    replicas: float
    """Copies of a micro-batch, on average."""
    rows: int
    """Most expert rows of a rank in a micro-batch."""


@dataclass(frozen=True)
class RecordedLoad:
    """Of all layers of a recording, on so many ranks with so many replica slots."""

    ranks: int
    """R."""
    replica_slots: int
    """Replica slots of a rank."""
    micro_batches: int
    """M."""
    capacity_factor: float
    """The least one, in hundredths, with which no layer needs more rows than are kept."""
    layers: Mapping[str, LayerLoad]
    """By name, as in the file."""

    @property
    def load_max(self) -> float:
        """Of the worst layer, as a run logs it."""
        return max(of.load_max for of in self.layers.values())

    @property
    def busiest_rank(self) -> float:
        """On average over layers, as a run logs it."""
        return mean(of.busiest_rank for of in self.layers.values())

    @property
    def replicas(self) -> float:
        """Copies of a layer and micro-batch, as a run logs them."""
        return mean(of.replicas for of in self.layers.values())


def recorded_load(
    ids: Mapping[str, Ids],
    experts: int,
    *,
    ranks: int,
    tokens: int,
    replication: ReplicationOptions,
    micro_batches: int | None = None,
) -> RecordedLoad:
    """What the recorded choices make of an expert-parallel group.

    Args:
        ids: choices [N, K] of each layer.
        experts: E.
        ranks: R.
        tokens: T.
        replication: slots, 0 for a run without, and the cost of a copy.
        micro_batches: M; None: as many as the recording has, but at least one.

    Raises:
        ValueError: sizes below 1, experts that do not divide over the ranks, or replicas for which
            these are too many; one line.
    """
    if (
        min(ranks, tokens, 1 if micro_batches is None else micro_batches) < 1
        or replication.slots < 0
    ):
        raise ValueError("ranks, tokens and micro-batches must be at least 1, and replica slots 0")
    if experts % ranks:
        raise ValueError(f"{experts} experts do not divide over {pluralize(ranks, 'rank')}")
    recorded, top_k = next(iter(ids.values())).shape
    M = max(1, recorded // (ranks * tokens)) if micro_batches is None else micro_batches
    layers = {}
    for name, ids_NK in ids.items():
        taken = ids_NK[np.arange(M * ranks * tokens) % recorded].reshape(M, -1)
        count_ME = np.stack([np.bincount(one, minlength=experts) for one in taken])
        layers[name] = layer_load(torch.from_numpy(count_ME).int(), ranks, replication)
    rows = max(of.rows for of in layers.values())
    factor = least_factor(rows, tokens=tokens, top_k=top_k)
    return RecordedLoad(ranks, replication.slots, M, factor, layers)


def layer_load(count_ME: Tensor, ranks: int, replication: ReplicationOptions) -> LayerLoad:
    """Of a layer, by the rows of each expert in each micro-batch: int32 [M, E]."""
    sum_E = count_ME.sum(0)
    load_MR = rows_MR = count_ME.unflatten(1, (ranks, -1)).sum(2)
    replicas = 0
    if replication.slots:
        plans = [make_replication_plan(count_E, replication.size(ranks)) for count_E in count_ME]
        load_MR = torch.stack([plan.load_2R[1] for plan in plans])
        rows_MR = torch.stack([rows_of_ranks(plan) for plan in plans])
        replicas = sum(int(plan.expert_RN.ge(0).sum()) for plan in plans)
    busiest_M = load_MR.amax(1).double() * ranks / count_ME.sum(1)
    return LayerLoad(
        load_max=float(sum_E.max().double() * len(sum_E) / sum_E.sum()),
        busiest_rank=float(busiest_M.mean()),
        replicas=replicas / len(count_ME),
        rows=int(rows_MR.max()),
    )


def rows_of_ranks(plan: ReplicationPlan) -> Tensor:
    """Expert rows that each rank computes, replicas' among them: int64 [R]."""
    kept_R = plan.owner_rows_E.unflatten(0, (len(plan.expert_RN), -1)).sum(1)
    return kept_R + (plan.end_RN - plan.begin_RN).sum(1)


def least_factor(rows: int, *, tokens: int, top_k: int) -> float:
    """The least `parallel.capacity_factor`, in hundredths, whose budget has so many rows.

    Args:
        rows: of a rank that needs most.
        tokens: T.
        top_k: K.
    """
    begin = (rows - ROW_MULTIPLE) * 100 // (tokens * top_k)  # what is kept is rounded up to it
    for hundredths in count(max(100, begin)):
        budget = Budget(hundredths / 100, torch.device("cpu"))
        if budget.rows(tokens, top_k, 1, 1, most=rows) == rows:
            return budget.capacity_factor
    raise AssertionError("some budget has them")
