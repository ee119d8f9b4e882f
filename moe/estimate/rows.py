"""What the budget of expert rows costs a rank: at `parallel.capacity_factor`, and at worst.

By difference: from a rank that keeps no expert rows, and from one whose tokens stay where they are
and that has no replicas.
"""

import copy
import math
from dataclasses import dataclass

from phalanx.configs.schema import Config
from phalanx.moe.estimate.activations import Activations, sizes
from phalanx.moe.estimate.memory import exchange_bytes, stage_memory
from phalanx.parallel.dispatcher.capacity import ROW_MULTIPLE


@dataclass(frozen=True)
class RowMemory:
    """Bytes of a rank with a number of expert rows, in the pipeline stage that has most."""

    rows: int
    """S."""
    layer: int
    """What the experts of a layer keep for its backward pass; 0 if that computes it again."""
    rank: int
    """What they keep in all layers and micro-batches in flight, and the backward pass of one."""


def row_memory(cfg: Config, world: int) -> tuple[RowMemory, RowMemory]:
    """With the rows of the budget, and with those of all tokens of a group on one rank.

    Args:
        cfg: valid, with resolved kernels (`moe.estimate.resolved`).
        world: ranks.
    """
    s = sizes(cfg, world)
    return _with(cfg, world, s.rows), _with(cfg, world, s.worst_rows)


def largest_factor(cfg: Config, world: int, room: int) -> float | None:
    """Most expert rows that fit, over the balanced load: the largest `parallel.capacity_factor`.

    Args:
        cfg, world: as of `row_memory`.
        room: bytes of a rank, for all that `stage_memory` and `exchange_bytes` count.

    Returns:
        In hundredths, rounded down; infinity if no routing needs more than fits, None if not even
        balanced experts fit.
    """
    s, beside = sizes(cfg, world), exchange_bytes(cfg, world)
    balanced = s.local_tokens * cfg.model.moe.top_k

    def fits(rows: int) -> bool:
        return max(m.peak for m in stage_memory(cfg, world, rows)) + beside <= room

    if fits(s.worst_rows):
        return math.inf
    fit, too_many = -(-balanced // ROW_MULTIPLE), -(-s.worst_rows // ROW_MULTIPLE)
    if not fits(min(fit * ROW_MULTIPLE, s.worst_rows)):
        return None
    while too_many - fit > 1:
        middle = (fit + too_many) // 2
        fit, too_many = (middle, too_many) if fits(middle * ROW_MULTIPLE) else (fit, middle)
    return fit * ROW_MULTIPLE * 100 // balanced / 100


def buffer_bytes(cfg: Config, world: int) -> int:
    """What dispatch holds at the peak of the stage where that is most, whatever the routing: of
    tokens, and of replicas.

    Args:
        cfg, world: as of `row_memory`.
    """
    staying, most = copy.deepcopy(cfg), sizes(cfg, world).worst_rows
    staying.parallel.dispatch, staying.parallel.expert_replication = "local", 0
    stages = zip(stage_memory(cfg, world, most), stage_memory(staying, world, most), strict=True)
    return exchange_bytes(cfg, world) + max(a.peak - b.peak for a, b in stages)


def _with(cfg: Config, world: int, rows: int) -> RowMemory:
    some, none = (Activations(cfg, world, n).moe_layer() for n in (rows, 0))
    stages = zip(stage_memory(cfg, world, rows), stage_memory(cfg, world, 0), strict=True)
    kept = max(a.saved - b.saved for a, b in stages)
    return RowMemory(rows, some.saved - none.saved, kept + some.backward - none.backward)
