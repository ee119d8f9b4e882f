"""Steps that were measured, here and elsewhere, beside the estimate and its bound."""

import pytest

from phalanx.configs.load import load
from phalanx.configs.records import OwnRecord, Record, configured, launch, own, published
from phalanx.configs.tables.machines import machine_named
from phalanx.configs.validate import validate
from phalanx.moe.plan.cost.step_time import bound, busiest, with_natural_routing
from phalanx.moe.plan.described import resolved
from tests.extras.planner.pages import timed

BALANCED = {name: r for name, r in own().items() if name.endswith("_balanced")}
IN_BF16 = [name for name, r in BALANCED.items() if r.dtype == "bf16"]
IN_FP8 = [name for name in BALANCED if name not in IN_BF16]


def expected_seconds(record: OwnRecord) -> float:
    """Expected time of a step of a record with balanced routing."""
    assert record.routing == "forced"
    world, overrides = launch(record.command)
    return timed(overrides, world).total


@pytest.mark.parametrize("name", IN_BF16)
def test_steps_take_as_long_as_expected(name: str) -> None:
    record = BALANCED[name]
    assert expected_seconds(record) == pytest.approx(record.step_time, rel=0.03)


@pytest.mark.parametrize("name", IN_FP8)
def test_steps_in_fp8_take_about_as_long_as_expected(name: str) -> None:
    record = BALANCED[name]
    assert expected_seconds(record) == pytest.approx(record.step_time, rel=0.05)


SLICES = {  # docs/measured/training/slices_one_h200.md: a step, attention, elementwise, update
    "qwen3_30b_a3b model.layers=12 data.micro_batch=2": (479.0, 95.9, 32.2, 40.7),
    "gpt_oss_20b model.layers=8 data.micro_batch=2": (617.9, 52.1, 29.0, 38.9),
    "deepseek_v3_l4 model.moe.experts=32 data.micro_batch=1": (1205, 187.9, 49.0, 37.0),
    "moonlight_16b_a3b model.layers=9 data.micro_batch=2": (448.3, 55.5, 29.7, 27.4),
}


@pytest.mark.parametrize("model", SLICES)
def test_parts_of_steps_on_one_gpu_are_near_what_was_measured(model: str) -> None:
    given = ["optim.moments=bf16", "parallel.grad_dtype=bf16", "parallel.expert=1"]
    given += ["data.sequence_length=4096", "data.global_batch=8"]
    balanced = "model.moe.router.force_balance=true"
    found = timed([*f"model={model}".split(), balanced, *given], 1)
    whole, attention, elementwise, update = (ms / 1e3 for ms in SLICES[model])
    assert found.attention == pytest.approx(attention, rel=0.06)
    assert found.elementwise == pytest.approx(elementwise, rel=0.17)
    assert found.optimizer == pytest.approx(update, rel=0.03)
    assert whole < found.total < 1.07 * whole


PARTS = {  # docs/measured/training/four_h200s.md: products, attention, update, waiting, collectives
    "own_gpt_oss_20b_4gpu_fused_balanced": (1176, 156, 30, 75, 14),
    "own_moonlight_4gpu_fused_balanced": (839, 163, 23, 51, 7),
    "own_qwen3_30b_a3b_4gpu_fused_balanced": (946, 374, 37, 127, 4),
    "own_deepseek_v3_l4_2gpu_fused_balanced": (492, 93, 32, 23, 14),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_steps_on_several_gpus_are_near_what_was_measured(name: str) -> None:
    world, overrides = launch(BALANCED[name].command)
    found = timed(overrides, world)
    products, attention, update, waiting, collectives = (ms / 1e3 for ms in PARTS[name])
    assert found.gemm + found.experts == pytest.approx(products, rel=0.06)
    assert found.attention == pytest.approx(attention, rel=0.08)
    assert found.optimizer == pytest.approx(update, rel=0.12)
    assert found.exchange + found.skew == pytest.approx(waiting, abs=0.03 * found.total)
    assert found.gradients == pytest.approx(collectives, abs=0.01 * found.total)


NATURAL = [name for name, r in own().items() if r.routing == "natural" and "fused" in name]


@pytest.mark.parametrize("name", NATURAL)
def test_natural_routing_takes_the_time_of_the_busiest_rank(name: str) -> None:
    record = own()[name]
    world, overrides = launch(record.command)
    cfg = load(overrides)
    expected = with_natural_routing(timed(cfg, world), busiest(cfg, world)).total
    assert expected == pytest.approx(record.step_time, rel=0.04)
    forced = load([*overrides, "model.moe.router.force_balance=true"])
    assert busiest(forced, world) == 1 < busiest(cfg, world)


RECORDS: dict[str, Record] = {f"{r.model}-{r.system}-{r.gpus}": r for r in published()} | own()


@pytest.mark.parametrize("name", RECORDS)
def test_nothing_measured_beats_the_bound(name: str) -> None:
    """Every record, published or measured, is below the bound of its layout, GPUs and precision."""
    record = RECORDS[name]
    cfg, world = configured(record)
    kind = record.hardware.split(" x ")[1].lower()
    cfg.run.machine = kind
    validate(cfg, world)
    assert cfg.precision.recipe == record.dtype
    best = bound(resolved(cfg, world, 8), world, machine_named(kind))
    tokens = cfg.data.global_batch * cfg.data.sequence_length / world / best.seconds
    assert record.tokens_per_second_per_gpu < tokens
