"""Experiments beside what a search finds for them, and figures of estimates in text."""

import re
import time
from pathlib import Path

import pytest

from phalanx.configs.arithmetic.accounting import flops_per_token
from phalanx.configs.layout import ranks_of_experiment
from phalanx.configs.load import load, options
from phalanx.configs.tables.machines import MACHINES
from phalanx.extras.planner.best import best, fastest, sets_of
from phalanx.extras.planner.layouts import layouts
from phalanx.moe.plan.cost.stages import stage_memory
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved
from tests.extras.planner.pages import PUBLISHED_V3

ROOT = Path(__file__).parents[3]
SIZED = {name: ranks for name in options("experiment") if (ranks := ranks_of_experiment(name))}
V3 = ["experiment=deepseek_v3_1024gpu"]


@pytest.mark.parametrize("name", SIZED)
def test_an_experiment_is_within_two_percent_of_its_search(name: str) -> None:
    """On one host at its micro-batch: a larger one takes memory that natural routing may need."""
    cfg, world = load([f"experiment={name}"]), SIZED[name]
    machine = MACHINES[cfg.run.machine]
    own = step_time(resolved(cfg, world, 8), world, machine).total
    if world > 8:
        found = best(cfg, world, machine, 1)
    else:
        sets, size = sets_of(cfg, machine), cfg.data.micro_batch
        near = (each for each in layouts(cfg, world, 8) if each.micro_batch == size)
        every = (fastest(cfg, layout, sets, world, machine) for layout in near)
        found = [one for one in every if one is not None]
    least = min(found, key=lambda one: one.seconds)
    assert own <= 1.02 * least.seconds, least


def rate(*overrides: str) -> int:
    """Tokens a second and GPU that a dry run expects."""
    cfg = load(list(overrides))
    world = SIZED[overrides[0].removeprefix("experiment=")]
    seconds = step_time(resolved(cfg, world, 8), world, MACHINES[cfg.run.machine]).total
    return round(cfg.data.global_batch * cfg.data.sequence_length / world / seconds)


def of_search(*overrides: str, world: int) -> tuple[int, int]:
    """Tokens and TFLOP a second and GPU of the best layout."""
    cfg = load(list(overrides))
    (found,) = best(cfg, world, MACHINES[cfg.run.machine], 1)
    flops = flops_per_token(cfg.model, cfg.data.sequence_length)
    return round(found.tokens), round(found.tokens * flops / 1e12)


def words(path: str) -> str:
    """Text of a file without marks of comments and breaks of lines."""
    return re.sub(r"\s+", " ", re.sub(r"^#", "", (ROOT / path).read_text(), flags=re.M))


def test_the_comment_of_deepseek_v3_has_the_figures_of_its_dry_runs() -> None:
    text = words("configs/experiment/deepseek_v3_1024gpu.yaml")
    assert (
        f"run expects {rate(*V3):,} tokens/s/GPU, and {rate(*PUBLISHED_V3):,} of the "
        "published record"
    ) in text
    assert " ".join(PUBLISHED_V3[1:]) in text


def test_the_comment_of_deepseek_v3_on_256_has_the_bytes_of_its_states() -> None:
    memory = stage_memory(resolved(load(["experiment=deepseek_v3_256gpu"]), 256, 8), 256)
    states = max(stage.weights.device_bytes for stage in memory) / 1e9
    text = words("configs/experiment/deepseek_v3_256gpu.yaml")
    assert f"Weights, gradients and optimizer take about {states:.0f} GB a GPU" in text


def test_the_page_on_operations_has_the_figures_of_searches() -> None:
    start = time.process_time()
    (bf16, _), (fp8, _) = (
        of_search(*V3, *more, world=1024) for more in ([], ["precision=fp8_block"])
    )
    seconds = time.process_time() - start
    _, qwen = of_search("experiment=qwen3_235b_64gpu", "run.machine=h100", world=256)
    text = words("docs/operations.md")
    assert (
        f"DeepSeek-V3 on 1,024 is expected to make {bf16:,} tokens/s/GPU in bf16 and {fp8:,} in "
        f"FP8 (published: 1,061 and 1,297), and Qwen3-235B on 256 {qwen} TFLOP/s (published: 302)"
    ) in text
    assert "which takes one to three seconds of a core beside two for imports" in text
    assert seconds / 2 < 15  # of a core that is shared
