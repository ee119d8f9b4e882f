"""Layers of pipeline chunks, balanced by their work."""

from itertools import combinations

import pytest

from phalanx.configs.arithmetic.accounting import flops_per_token, head_flops, layer_flops
from phalanx.configs.arithmetic.stages import balanced, even
from phalanx.configs.layout import pipeline_chunks
from phalanx.configs.load import load


def chunks(*overrides: str) -> list[int]:
    return [chunk.count("t") for chunk in pipeline_chunks(load(list(overrides)))]


def test_layers_are_dealt_out_evenly_where_that_costs_nothing() -> None:
    assert chunks("model=tiny", "parallel.pipeline=2") == [2, 2]
    assert chunks("model=tiny", "parallel.pipeline=2", "parallel.virtual_pipeline=2") == [1] * 4
    assert balanced((1.0,) * 12, 0.01, 4, 4) == (3, 3, 3, 3)
    assert even(11, 4) == [3, 3, 3, 2]


def test_the_stage_of_a_large_output_layer_has_fewer_layers() -> None:
    gpt_oss = ["model=gpt_oss_20b", "model.layers=8", "parallel.pipeline=2"]
    assert chunks(*gpt_oss) == [6, 2]
    first, second, third, last = chunks(*gpt_oss, "parallel.virtual_pipeline=2")
    assert first + second + third + last == 8 and first + third > second + last
    assert chunks("model=qwen3_235b_a22b", "parallel.pipeline=4") == [24, 24, 24, 22]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_split_has_a_busiest_stage_that_needs_much_less(seed: int) -> None:
    """Against all splits, for one chunk a stage."""
    costs = tuple(1.0 + (seed * i * 7 % 5) / 4 for i in range(9))
    last, stages = seed / 4, 3

    def busiest(counts: tuple[int, ...]) -> float:
        ends = [sum(counts[: i + 1]) for i in range(stages)]
        loads = [1.3 * sum(costs[end - n : end]) for end, n in zip(ends, counts, strict=True)]
        loads[-1] += last
        return max(loads)

    splits = [(a, b - a, 9 - b) for a, b in combinations(range(1, 10), 2)]
    best = min(busiest(split) for split in splits)
    assert busiest(balanced(costs, last, stages, stages)) <= 1.05 * best


@pytest.mark.parametrize("name", ["gpt_oss_20b", "deepseek_v3"])
def test_layers_and_output_layer_make_up_the_flops_of_a_token(name: str) -> None:
    m = load([f"model={name}"]).model
    layers = sum(layer_flops(m, 4096))
    projections = 6.0 * m.mtp_layers * 2 * m.hidden**2
    assert layers + head_flops(m) + projections == pytest.approx(flops_per_token(m, 4096))


def test_layers_need_not_divide() -> None:
    assert sorted(chunks("model=tiny", "model.layers=5", "parallel.pipeline=2")) == [2, 3]
