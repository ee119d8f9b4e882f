"""Pages of dry runs, or some sections of them, for tests.

The planner is imported by the functions: tests of other folders are collected without extras.
"""

import functools
from collections.abc import Sequence

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import validate
from phalanx.moe.plan.cost.step_time import StepTime, step_time
from phalanx.moe.plan.described import resolved

RUN, EXPERTS, STEP = "Phalanx", "Experts of one layer", "Expected step"
MEMORY, GROUPS, OPT_INS = "Memory of a rank", "Process groups", "Off by default"
"""Headings of sections."""

PUBLISHED_V3 = [
    *["experiment=deepseek_v3_1024gpu", "parallel.overlap_microbatches=off"],
    *["parallel.pipeline_layout='Et|(tt|)*30mL'", "run.recompute=[mla_up,mlp]", "run.offload=[]"],
]
"""Layout of the published record of DeepSeek-V3 on 1,024 H100s (Megatron-Bridge)."""


@functools.cache
def loaded(*overrides: str) -> Config:
    return load(overrides)


@functools.cache
def page(*overrides: str, world: int) -> tuple[str, int]:
    from phalanx.extras.planner.dry_run import dry_run

    cfg = loaded(*overrides)
    validate(cfg, world)
    return dry_run(cfg, world)


def section(heading: str | tuple[str, ...], *overrides: str, world: int) -> str:
    """Lines of one section of the page, or of several, without the time that the others take."""
    from phalanx.extras.planner.dry_run import sections

    cfg = loaded(*overrides)
    validate(cfg, world)
    found, _ = sections(cfg, world)
    bodies = [lines for head, lines in found.items() if head.startswith(heading)]
    assert bodies
    return "".join(f"\n  {line}" for lines in bodies for line in lines) + "\n"


def timed(cfg: Config | Sequence[str], world: int = 8, machine: str = "h200") -> StepTime:
    """Expected time of a step on nodes of 8 GPUs, of a configuration or of overrides."""
    cfg = cfg if isinstance(cfg, Config) else loaded(*cfg)
    return step_time(resolved(cfg, world, 8), world, MACHINES[machine])


def fitting(*overrides: str, world: int) -> bool:
    """True if the page would say that the run fits, and the exit code be 0."""
    from phalanx.extras.planner.dry_run import sections

    cfg = loaded(*overrides)
    validate(cfg, world)
    return sections(cfg, world)[1]
