"""Load of experts and ranks under a recorded routing, and the expert rows that it needs.

Computes on a CPU, before a run, what the run would log, with expert replication and without. The
recorded tokens are one step. Micro-batch m of an expert-parallel group has R * T of them from token
m * R * T on, and wraps around after the last, as in `moe.router.forced`. Tokens after the last full
micro-batch are not counted. Plans of replicas and the budget of rows are the transports'.

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
from phalanx.extras.replication.kernels.replication_plan import (
    ReplicationPlan,
    make_replication_plan,
)
from phalanx.extras.replication.options import ReplicationOptions
from phalanx.moe.router.recording import Ids
from phalanx.parallel.dispatcher.capacity import ROW_MULTIPLE, Budget


@dataclass(frozen=True)
class LayerLoad:
    """Load of one layer."""

    load_max: float  # tokens of the busiest expert over the mean, in the step
    busiest_rank: float
    """Rows of the busiest rank over the mean, averaged over micro-batches, with copies and their
    cost: `rank_load_with_replicas` of a run, `rank_load_without_replicas` without copies."""
    replicas: float  # copies in a micro-batch, on average
    rows: int  # most expert rows of a rank in a micro-batch


@dataclass(frozen=True)
class RecordedLoad:
    """Load of all layers of a recording, for a number of ranks and of replica slots."""

    ranks: int  # number of ranks, R
    replica_slots: int  # replica slots of a rank
    micro_batches: int  # number of micro-batches, M
    capacity_factor: float  # smallest one, in hundredths, with enough rows
    layers: Mapping[str, LayerLoad]  # load of each layer, by its name in the file

    @property
    def load_max(self) -> float:
        return max(load.load_max for load in self.layers.values())

    @property
    def busiest_rank(self) -> float:
        return mean(load.busiest_rank for load in self.layers.values())

    @property
    def replicas(self) -> float:
        return mean(load.replicas for load in self.layers.values())


def recorded_load(
    ids: Mapping[str, Ids],
    experts: int,
    *,
    ranks: int,
    tokens: int,
    replication: ReplicationOptions,
    micro_batches: int | None = None,
) -> RecordedLoad:
    """Load of an expert-parallel group under recorded choices [N, K] of each layer.

    Args:
        replication: slots, 0 for a run without, and the cost of a copy.
        micro_batches: M; by default as many as the recording has, but at least one.

    Raises:
        ValueError: sizes below 1, experts that do not divide over the ranks, or too many ranks or
            experts for replicas; one line.
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
        chosen_MN = ids_NK[np.arange(M * ranks * tokens) % recorded].reshape(M, -1)
        count_ME = np.stack([np.bincount(chosen_N, minlength=experts) for chosen_N in chosen_MN])
        layers[name] = layer_load(torch.from_numpy(count_ME).int(), ranks, replication)
    rows = max(load.rows for load in layers.values())
    factor = least_factor(rows, tokens=tokens, top_k=top_k)
    return RecordedLoad(ranks, replication.slots, M, factor, layers)


def layer_load(count_ME: Tensor, ranks: int, replication: ReplicationOptions) -> LayerLoad:
    """Load of a layer from the rows of each expert in each micro-batch, int32 [M, E]."""
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
    """Number of expert rows that each rank computes, including replicas: int64 [R]."""
    kept_R = plan.owner_rows_E.unflatten(0, (len(plan.expert_RN), -1)).sum(1)
    return kept_R + (plan.end_RN - plan.begin_RN).sum(1)


def least_factor(rows: int, *, tokens: int, top_k: int) -> float:
    """Smallest `parallel.capacity_factor`, in hundredths, with `rows` rows on a rank."""
    lower = (rows - ROW_MULTIPLE) * 100 // (tokens * top_k)  # budgets are rounded up to a multiple
    for hundredths in count(max(100, lower)):
        budget = Budget(hundredths / 100, torch.device("cpu"))
        if budget.rows(tokens, top_k, 1, 1, most=rows) == rows:
            return budget.capacity_factor
    raise AssertionError("some budget has enough rows")
