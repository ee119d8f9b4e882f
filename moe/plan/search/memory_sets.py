"""Sets of names of `run.recompute` and `run.offload`, the fastest first."""

import math
from itertools import product
from typing import NamedTuple

from phalanx.configs.knobs import Changes, changed
from phalanx.configs.memory import memory_problems
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine
from phalanx.moe.plan.cost.stages import stage_memory
from phalanx.moe.plan.cost.step_time import step_time

_RECOMPUTED: tuple[list[str], ...] = (
    [],
    ["norm"],
    ["norm", "mlp"],
    ["norm", "mla_up"],
    ["norm", "mla_up", "mlp"],
    ["norm", "mla_up", "mlp", "expert_h"],
    ["norm", "mla_up", "mlp", "attention", "expert_h"],
    ["norm", "mla_up", "mlp", "moe"],
    ["full"],
)
_OFFLOADED: tuple[list[str], ...] = (
    [],
    ["expert_h"],
    ["residual"],
    ["attention"],
    ["residual", "expert_h"],
    ["residual", "attention", "expert_h"],
)

_EACH = 0.002
"""Part of a step by which one more name must be faster: estimates see no difference below."""


class MemorySet(NamedTuple):
    """One set."""

    changes: Changes  # its two knobs
    relative: float  # time of a step over that with the fastest set


def memory_sets(cfg: Config, world: int, machine: Machine) -> list[MemorySet]:
    """Sets that a model allows, each with less memory than all that are faster.

    Times and bytes are those of one layout; others have the same order, nearly.

    Args:
        cfg: with resolved kernels (`moe.plan.described`), best of one stage, which is quick.
        world: ranks.
        machine: rates.
    """
    names = {name for names in _RECOMPUTED for name in names}
    valid = {n for n in names if not list(memory_problems(changed(cfg, _set([n], []))))}
    found = list[tuple[float, int, Changes]]()
    for recompute, offload in product(_RECOMPUTED, _OFFLOADED):
        some = [name for name in recompute if name in valid]
        chosen = _set(some, offload)
        trial = changed(cfg, chosen)
        if (chosen in [x for *_, x in found]) or list(memory_problems(trial)):
            continue
        saved = max(m.saved + m.backward for m in stage_memory(trial, world))
        number = len(some) + len(offload)
        seconds = step_time(trial, world, machine).total * (1 + _EACH * number)
        found.append((seconds, saved, chosen))
    found.sort(key=lambda each: each[:2])
    least, sets = math.inf, list[MemorySet]()
    for seconds, saved, chosen in found:
        if saved < least:
            least = saved
            sets.append(MemorySet(chosen, seconds / found[0][0]))
    return sets


def _set(recompute: list[str], offload: list[str]) -> Changes:
    return {"run.recompute": recompute, "run.offload": offload}
