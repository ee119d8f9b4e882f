"""Figures of docs/long_context.md beside those of dry runs and of the program that made them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.configs.layout import ranks_of_experiment
from phalanx.configs.load import load
from phalanx.configs.tables.machines import MACHINES
from phalanx.moe.plan.cost.stages import host_needed, needed, stage_memory
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved

PAGE = (Path(__file__).parents[3] / "docs/long_context.md").read_text("utf-8")
GIB = 2**30
ROWS = re.findall(
    r"^\| (.*) \| (\d+) \| ([\d,]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$", PAGE, re.M
)
"""Overrides, GPUs, tokens/s/GPU, seconds, GiB of a GPU, of activations, of the host."""


def configurations() -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """Overrides of each row: an experiment, or those over the last one."""
    experiment = ""
    for what, *figures in ROWS:
        words = what.split("`")[1].split()
        if "=" not in words[0]:
            experiment, *words = words
        yield [f"experiment={experiment}", *words], tuple(figures)


@pytest.mark.parametrize(("overrides", "figures"), configurations(), ids=[row[0] for row in ROWS])
def test_rows_are_those_of_dry_runs(overrides: list[str], figures: tuple[str, ...]) -> None:
    world = int(figures[0])
    cfg = load([*overrides, f"parallel.world_size={world}"])
    machine = MACHINES[cfg.run.machine]
    cfg = resolved(cfg, world, machine.node_gpus)
    seconds = step_time(cfg, world, machine).total
    tokens = cfg.data.global_batch * cfg.data.sequence_length / world / seconds
    saved = max(stage.saved for stage in stage_memory(cfg, world)) / GIB
    size = needed(cfg, world) / GIB + machine.reserved_gib
    host = host_needed(cfg, world) / GIB
    assert figures[1:] == (
        *(f"{tokens:,.0f}", f"{seconds:.0f}", f"{size:.1f}", f"{saved:.1f}", f"{host:.0f}"),
    )


def test_the_page_has_both_recipes() -> None:
    names = {row[0].strip("`") for row in ROWS}
    assert {"qwen3_30b_128k_8gpu", "qwen3_30b_1m_32gpu"} <= names and len(ROWS) == 9
    assert all(ranks_of_experiment(name) for name in names if name.endswith("gpu"))
