"""Sizes that a configuration resolves to, and the layouts of all experiments."""

import pytest

from phalanx.configs.load import load, options
from phalanx.configs.validate import data_parallel_size, expert_parallel_size, micro_batches
from tests.configs.test_validate import problems
from tests.support.distributed import run_distributed


@pytest.mark.parametrize(
    ("overrides", "world", "expert"),
    [
        ("", 1, 1),
        ("", 2, 2),
        ("", 6, 2),
        ("", 16, 8),
        ("model.moe.experts=6", 4, 2),
        ("parallel.pipeline=2", 4, 2),
        ("parallel.tensor=2", 8, 8),  # experts spread over tensor parallel ranks too
        ("parallel.expert=4", 8, 4),
    ],
)
def test_expert_parallel_size(overrides: str, world: int, expert: int) -> None:
    assert expert_parallel_size(load(overrides.split()), world) == expert


def test_sizes_of_a_large_layout() -> None:
    cfg = load(["experiment=deepseek_v3_1024gpu"])
    assert data_parallel_size(cfg, 1024) == 64
    assert micro_batches(cfg, 1024) == 256


EXPERIMENTS = {
    "deepseek_v3_1024gpu": 1024,
    "deepseek_v3_256gpu": 256,
    "gpt_oss_120b_64gpu": 64,
    "deepseek_v3_l4_8gpu": 8,
    "gpt_oss_20b_8gpu": 8,
    "moonlight_8gpu": 8,
    "qwen3_30b_8gpu": 8,
    "qwen3_235b_64gpu": 64,
    "mixtral_8x7b_8gpu": 8,
    "mixtral_8x22b_64gpu": 64,
    "deepseek_v2_lite_8gpu": 8,
    "kimi_k2_256gpu": 256,
    "olmoe_8gpu": 8,
    "glm_4_5_128gpu": 128,
    "glm_4_5_air_32gpu": 32,
    "minimax_m2_64gpu": 64,
    "qwen3_next_16gpu": 16,
}


def test_every_experiment_has_a_size() -> None:
    assert sorted(EXPERIMENTS) == options("experiment")


@pytest.mark.parametrize(("name", "world"), EXPERIMENTS.items())
def test_experiment_is_valid_at_its_size(name: str, world: int) -> None:
    assert problems(load([f"experiment={name}"]), world) == []
    assert problems(load([f"experiment={name}", "run=bench"]), world) == []
    # The layout to check wins over the ranks that check it.
    assert problems(load([f"experiment={name}", f"parallel.world_size={world}"]), 1) == []


def megatron_layouts(experiments: dict[str, int]) -> dict[str, tuple[int, int]]:
    """(stages, chunks) of every experiment as Megatron-Core reads its layout."""
    from phalanx.parallel.megatron import cpu

    cpu.install()
    from phalanx.moe.model.gpt import Layout, transformer_config

    found = {}
    for name, world in experiments.items():
        cfg = load([f"experiment={name}"])
        p, expert = cfg.parallel, expert_parallel_size(cfg, world)
        layout = Layout(p.tensor, p.context, p.pipeline, p.virtual_pipeline, expert)
        config = transformer_config(cfg, layout, on_cpu=True)
        chunks = config.virtual_pipeline_model_parallel_size or 1
        found[name] = (config.pipeline_model_parallel_size, chunks)
    return found


def test_megatron_core_accepts_the_layout_of_every_experiment() -> None:
    (found,) = run_distributed(megatron_layouts, 1, EXPERIMENTS)
    large = {
        "deepseek_v3_1024gpu": (8, 4),
        "deepseek_v3_256gpu": (16, 2),
        "gpt_oss_120b_64gpu": (4, 1),
        "qwen3_235b_64gpu": (4, 1),
        "mixtral_8x22b_64gpu": (4, 1),
        "kimi_k2_256gpu": (16, 2),
        "glm_4_5_128gpu": (8, 1),
        "glm_4_5_air_32gpu": (4, 1),
        "minimax_m2_64gpu": (4, 1),
        "qwen3_next_16gpu": (2, 1),
    }
    assert found == {name: large.get(name, (1, 1)) for name in EXPERIMENTS}
