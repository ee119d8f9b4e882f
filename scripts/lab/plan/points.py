"""Fastest layouts of four models on clusters of H100s, which docs/plan.md shows.

A table of the page has the layout of each, so that a figure can be computed again without a search.
"""

import functools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.configs.knobs import overrides
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import Machine, machine_named
from phalanx.extras.planner.best import best, estimated
from phalanx.extras.planner.certainty import error_of
from phalanx.moe.plan.cost.stages import StageMemory, exchange_bytes, stage_memory
from phalanx.moe.plan.cost.step_time import StepTime, step_time
from phalanx.moe.plan.described import resolved

MACHINE = "h100"
MODELS: Mapping[str, str] = {
    "GPT-OSS-120B": "gpt_oss_120b_64gpu",
    "Qwen3-235B": "qwen3_235b_64gpu",
    "DeepSeek-V3": "deepseek_v3_256gpu",
    "Kimi-K2": "kimi_k2_256gpu",
}
"""Experiments, whose batches and sequences stay, by the names of their models."""
SIZES = (64, 128, 256, 512, 1024, 2048)
SHOWN = 1024
"""GPUs of the pictures of memory and time."""
IN_MEMORY = "DeepSeek-V3"
TOKENS = 1e12  # of which the table has the days
SEARCHED = 5  # layouts that a search shows, whose number decides how far it looks


@dataclass(frozen=True)
class Point:
    """The fastest layout of a model on a number of GPUs."""

    model: str
    gpus: int
    layout: str  # overrides of its experiment
    rate: float  # expected tokens a second and GPU with balanced experts
    natural: float  # the same with natural routing
    error: float  # part by which the rate may be off
    memory_gib: float  # of a GPU, what CUDA and NCCL need included

    @property
    def days(self) -> float:
        """Days for `TOKENS` with natural routing and no stops."""
        return TOKENS / (self.natural * self.gpus) / 86400


def machine() -> Machine:
    return machine_named(MACHINE)


@functools.cache
def configuration(model: str, gpus: int, layout: str = "") -> Config:
    """The experiment of a model on so many GPUs, with the overrides of a layout."""
    words = [f"experiment={MODELS[model]}", f"run.machine={MACHINE}", *shlex.split(layout)]
    return load([*words, f"parallel.world_size={gpus}"])


@functools.cache
def point(model: str, gpus: int) -> Point | None:
    """The fastest layout of a search; None if none fits."""
    found = best(configuration(model, gpus), gpus, machine(), SEARCHED)
    return again(model, gpus, overrides(found[0].changes)) if found else None


def again(model: str, gpus: int, layout: str) -> Point | None:
    """The estimate of a layout; None if it does not fit."""
    cfg = configuration(model, gpus, layout)
    if (one := estimated(cfg, {}, gpus, machine())) is None:
        return None
    error, _ = error_of(known(model, gpus, layout), gpus, machine())
    size = one.size / 2**30 + machine().reserved_gib
    return Point(model, gpus, layout, one.tokens, one.natural, error, size)


def known(model: str, gpus: int, layout: str) -> Config:
    """The configuration of a layout without `auto`."""
    return resolved(configuration(model, gpus, layout), gpus, machine().node_gpus)


def every_point() -> list[Point]:
    """All models on all sizes on which they fit, the smallest clusters first."""
    every = (point(model, gpus) for model in MODELS for gpus in SIZES)
    return [each for each in every if each is not None]


def memory(one: Point) -> tuple[list[StageMemory], int]:
    """Memory of a rank of each stage, and bytes of its exchange buffers."""
    cfg = known(one.model, one.gpus, one.layout)
    return stage_memory(cfg, one.gpus), exchange_bytes(cfg, one.gpus)


def time(one: Point) -> StepTime:
    """Seconds of a step by part."""
    cfg = known(one.model, one.gpus, one.layout)
    return step_time(cfg, one.gpus, machine())
