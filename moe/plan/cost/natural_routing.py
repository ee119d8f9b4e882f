"""Steps with natural routing, in which some ranks have more expert rows than others.

All ranks of an expert-parallel group wait for the busiest one. Its rows over the mean were measured
as what natural routing costs runs of five models beside the same runs with balanced experts: steps
41 to 50 from scratch (docs/measured/training/own_*.yaml), the mean of three such pairs of 22 and 27
November 2026, and of Mixtral of one in FP8, with two experts on a rank. Routers that have trained
for longer are more even: 1.07 on eight ranks (docs/measured/training/routing_load.md).
"""

from dataclasses import replace
from statistics import median

from phalanx.configs.layout import may_be_uneven
from phalanx.configs.schema import Config
from phalanx.moe.plan.cost.step_time import StepTime

BUSIEST: dict[str, float] = {
    "deepseek_v3_l4": 1.36,
    "gpt_oss_20b": 1.11,
    "mixtral_8x7b": 1.81,
    "moonlight_16b_a3b": 1.15,
    "qwen3_30b_a3b": 1.26,
}
"""Rows of the busiest rank over the mean, by model."""


def busiest(cfg: Config, world: int) -> float:
    """Rows of the busiest rank over the mean: measured with the model, or the median of all.

    1 where all experts of a layer are on one rank, or routing is balanced by force.
    """
    if not may_be_uneven(cfg, world):
        return 1.0
    return BUSIEST.get(cfg.model.name, median(BUSIEST.values()))


def with_natural_routing(step: StepTime, load: float) -> StepTime:
    """A step whose busiest rank computes and exchanges `load` times the mean rows."""
    return replace(step, experts=load * step.experts, exchange=load * step.exchange)
