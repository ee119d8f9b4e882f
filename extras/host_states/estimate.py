"""Memory and time of states in host memory: slots on the GPU, what stays there, and copies."""

from typing import NamedTuple

from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine, with_margin
from phalanx.configs.tables.optimizers import MOMENTS, OPTIMIZERS
from phalanx.extras.host_states.stream import ELEMENTS, SLOTS
from phalanx.kernels.registry import Choice
from phalanx.moe.plan.cost.stages import USABLE, needed, with_growth
from phalanx.moe.plan.cost.weights import stage_weights
from phalanx.moe.text import storage

TOGETHER = 64 << 20
"""Elements that Muon makes orthogonal at a time, but for larger matrices."""


def slot_bytes(cfg: Config, states: int) -> int:
    """Bytes of a GPU in which so many bytes of states take turns."""
    wide = 2 if MOMENTS[cfg.optim.moments].bf16 else 4
    largest = 3 * wide * ELEMENTS  # of AdamW: two moments, and a master copy or a half of one
    if OPTIMIZERS[cfg.optim.kind].whole_matrices:
        m = cfg.model
        largest = max(largest, 2 * wide * max(TOGETHER, m.hidden * max(m.dense_ffn, m.moe.ffn)))
    return min(states, SLOTS * largest)


class Placement(NamedTuple):
    """Where states are between updates."""

    room: int  # bytes of the GPU for states that stay there
    line: Choice  # of the start page


def placement(cfg: Config, world: int, free: int) -> Placement:
    """What stays on a GPU with so many bytes free before the model is built; 0 on a CPU.

    That is what the run leaves free by the estimate, with the rows that natural routing may need.
    """
    hosted = max(w.hosted_bytes for w in stage_weights(cfg, world))
    left = with_margin(int(USABLE * free)) - needed(with_growth(cfg, world), world)
    room = min(hosted, max(0, left))
    place = f"{storage(hosted)} of a rank, of which {storage(room)} stay on the GPU"
    reason = f"optim.moments={cfg.optim.moments}; {place}; updates are eager"
    return Placement(room, Choice("states", "host", reason))


def seconds(cfg: Config, world: int, machine: Machine) -> float:
    """Seconds of the copies of an update, each way at once, that nothing hides.

    What fits in the slots is copied beside the next step.
    """
    room = placement(cfg, world, machine.room).room
    weights = max(stage_weights(cfg, world), key=lambda w: w.hosted_bytes)
    return max(0, weights.hosted_bytes - weights.slot_bytes - room) / (machine.host_gbs * 1e9)
