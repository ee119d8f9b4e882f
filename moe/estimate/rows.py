"""What the budget of expert rows costs a rank: at `parallel.capacity_factor`, and at worst.

By difference: from a rank that keeps no expert rows, and from one whose tokens stay where they are.
"""

import copy
from dataclasses import dataclass

from configs.schema import Config
from moe.estimate.activations import Activations, sizes
from moe.estimate.memory import exchange_bytes, stage_memory


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


def buffer_bytes(cfg: Config, world: int) -> int:
    """What dispatch holds at the peak of the stage where that is most, whatever the routing.

    Args:
        cfg, world: as of `row_memory`.
    """
    staying, most = copy.deepcopy(cfg), sizes(cfg, world).worst_rows
    staying.parallel.dispatch = "local"
    stages = zip(stage_memory(cfg, world, most), stage_memory(staying, world, most), strict=True)
    return exchange_bytes(cfg, world) + max(a.peak - b.peak for a, b in stages)


def _with(cfg: Config, world: int, rows: int) -> RowMemory:
    some, none = (Activations(cfg, world, n).moe_layer() for n in (rows, 0))
    stages = zip(stage_memory(cfg, world, rows), stage_memory(cfg, world, 0), strict=True)
    kept = max(a.saved - b.saved for a, b in stages)
    return RowMemory(rows, some.saved - none.saved, kept + some.backward - none.backward)
