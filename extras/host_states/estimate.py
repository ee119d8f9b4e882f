"""Memory and time of states in host memory: slots on the GPU, what stays there, and copies."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from phalanx.configs.knobs import pluralize
from phalanx.configs.layout import stage_ranks
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.configs.tables.optimizers import MOMENTS, OPTIMIZERS
from phalanx.configs.validate import ConfigError
from phalanx.extras.host_states.stream import ELEMENTS, SLOTS
from phalanx.kernels.registry import Choice
from phalanx.moe.plan.cost.stages import needed, with_growth
from phalanx.moe.plan.cost.weights import stage_weights
from phalanx.moe.plan.facts import JobFacts, free_gpu_memory
from phalanx.moe.plan.memory_check import pinned_bytes
from phalanx.moe.plan.plan import Plan
from phalanx.moe.text import storage

TOGETHER = 64 << 20
"""Elements that Muon makes orthogonal at a time, but for larger matrices."""
_FILLED = 0.93
"""Part of free memory up to which states stay. On an H200 10 GiB are left: NCCL takes some, blocks
of the allocator leave up to 4.7 unused (`moe.plan.cost.stages.USABLE`), and the estimate errs."""
_WORK = 10
"""Bytes of each for its products, which eager updates do not take from the memory of a graph."""


def slot_bytes(cfg: Config, states: int) -> int:
    """Bytes of a GPU in which so many bytes of states take turns, and are updated."""
    wide, work = 2 if MOMENTS[cfg.optim.moments].bf16 else 4, 0
    largest = 3 * wide * ELEMENTS  # of AdamW: two moments, and a master copy or a half of one
    if OPTIMIZERS[cfg.optim.kind].whole_matrices:
        m = cfg.model
        elements = max(TOGETHER, m.hidden * max(m.dense_ffn, m.moe.ffn))
        largest, work = max(largest, 2 * wide * elements), _WORK * elements
    return min(states, SLOTS * largest) + min(work, 5 * states)


class Placement(NamedTuple):
    """Place of states between updates."""

    room: int  # bytes of the GPU for states that stay there
    lines: list[Choice]  # of the start page


def placement(plan: Plan, device: torch.device) -> Placement:
    """Place of a run's states, before its model is built; on a CPU all wait on the host."""
    free = free_gpu_memory(device).free if device.type == "cuda" else 0
    hosted, room = most_hosted(plan.cfg, plan.world), room_of(plan.cfg, plan.world, free)
    reason = f"optim.moments={plan.cfg.optim.moments}; {storage(hosted)} of a rank, of which "
    reason += f"{storage(room)} stay on the GPU; updates are eager"
    return Placement(room, [*plan.lines(), Choice("states", "host", reason)])


def room_of(cfg: Config, world: int, free: int) -> int:
    """Bytes of states that stay on a GPU with so many bytes free.

    The run leaves them free by the estimate, with the rows that natural routing may come to need.
    """
    left = int(_FILLED * free) - needed(with_growth(cfg, world), world)
    return min(most_hosted(cfg, world), max(0, left))


def most_hosted(cfg: Config, world: int) -> int:
    """Bytes of states in host memory of the rank with most."""
    return max(w.hosted_bytes for w in stage_weights(cfg, world))


def seconds(cfg: Config, world: int, machine: Machine) -> float:
    """Seconds of an update's copies, both ways at once, that nothing hides.

    What the slots hold is copied beside the next step.
    """
    slots = max(w.device_states for w in stage_weights(cfg, world))
    travel = most_hosted(cfg, world) - room_of(cfg, world, machine.room) - slots
    return max(0, travel) / (machine.host_gbs * 1e9)


def lines(cfg: Config, world: int, machine: Machine) -> Iterator[str]:
    """Lines of a dry run."""
    rank, room = most_hosted(cfg, world), room_of(cfg, world, machine.room)
    ranks = list(range(min(world, machine.node_gpus)))
    node = _hosted(cfg, world, ranks)
    yield (
        f"states of the optimizer in host memory: {storage(rank)} of a rank, of which "
        f"{storage(room)} stay on the GPU between updates; {storage(node)} of a node of "
        f"{pluralize(len(ranks), 'GPU')}"
    )
    if cfg.run.save_interval >= 0 and cfg.run.async_save != "off":
        both = storage(node + pinned_bytes(cfg, world, ranks))
        yield f"with a background checkpoint {both} of a node; run.async_save=off needs no more"


def check_hosts(cfg: Config, facts: JobFacts) -> None:
    """Raise ConfigError if the states of some host's ranks do not fit its memory."""
    for rank in {r.host: r for r in facts.ranks}.values():
        ranks, host, moments = facts.on_host(rank.rank), rank.host_memory, cfg.optim.moments
        if (need := _hosted(cfg, facts.world, ranks)) > host.free:
            narrow = "" if MOMENTS[moments].bf16 else "set optim.moments=bf16_host or "
            raise ConfigError(
                f"{cfg.model.name} does not fit: with optim.moments={moments} the states of "
                f"{pluralize(len(ranks), 'rank')} take {storage(need)} of {host.device}, which has "
                f"{storage(host.free)} free: {narrow}use more hosts (rank {rank.rank})"
            )


def _hosted(cfg: Config, world: int, ranks: Sequence[int]) -> int:
    weights, each = stage_weights(cfg, world), stage_ranks(cfg, world)
    return sum(weights[rank // each].hosted_bytes for rank in ranks)
