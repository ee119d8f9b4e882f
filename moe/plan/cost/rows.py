"""Memory of a rank's budget of expert rows: at `parallel.capacity_factor`, and at worst.

Computed as the difference from a rank without expert rows, and from one that sends no tokens and
has no replicas.
"""

import copy
import math
from dataclasses import dataclass

from phalanx.configs.schema import Config
from phalanx.moe.plan.cost.activations import Activations, sizes
from phalanx.moe.plan.cost.delayed_wgrad import OFF
from phalanx.moe.plan.cost.stages import exchange_bytes, stage_memory, with_delayed
from phalanx.parallel.dispatcher.capacity import ROW_MULTIPLE


@dataclass(frozen=True)
class RowMemory:
    """Bytes of a number of expert rows, on a rank of the pipeline stage with most."""

    rows: int  # S
    layer: int
    """Bytes that the experts of a layer save for its backward pass; 0 if it recomputes them."""
    rank: int
    """Saved bytes of all layers and micro-batches in flight, and one layer's backward pass."""


def row_memory(cfg: Config, world: int) -> tuple[RowMemory, RowMemory]:
    """Memory of the budgeted rows, and of the rows if all tokens of a group meet on one rank.

    Args:
        cfg: valid, with resolved kernels (`moe.plan.described`).
        world: ranks.
    """
    s = sizes(cfg, world)
    return _row_memory(cfg, world, s.rows), _row_memory(cfg, world, s.worst_rows)


def largest_factor(cfg: Config, world: int, available: int) -> float | None:
    """Largest `parallel.capacity_factor` that fits: expert rows over the balanced load.

    Args:
        cfg, world: as for `row_memory`.
        available: bytes of a rank for everything in `stage_memory` and `exchange_bytes`.

    Returns:
        The factor, rounded down to hundredths; infinity if the worst routing fits, None if not
        even balanced experts do.
    """
    s, exchange = sizes(cfg, world), exchange_bytes(cfg, world)
    balanced = s.local_tokens * cfg.model.moe.top_k

    def fits(rows: int) -> bool:
        return max(m.peak for m in stage_memory(cfg, world, rows)) + exchange <= available

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
    """Bytes of dispatch buffers at the peak, on the stage with most, under the worst routing.

    Args:
        cfg, world: as for `row_memory`.
    """
    most = sizes(cfg, world).worst_rows
    sent = with_delayed(cfg, OFF)  # operands that wait depend on the transport
    local = copy.deepcopy(sent)
    local.parallel.dispatch, local.parallel.expert_replication = "local", 0
    stages = zip(stage_memory(sent, world, most), stage_memory(local, world, most), strict=True)
    return exchange_bytes(cfg, world) + max(a.peak - b.peak for a, b in stages)


def _row_memory(cfg: Config, world: int, rows: int) -> RowMemory:
    some, none = (Activations(cfg, world, n).moe_layer() for n in (rows, 0))
    stages = zip(stage_memory(cfg, world, rows), stage_memory(cfg, world, 0), strict=True)
    saved = max(a.saved - b.saved for a, b in stages)
    return RowMemory(rows, some.saved - none.saved, saved + some.backward - none.backward)
