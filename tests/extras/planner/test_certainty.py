"""The range of an expected speed, and the rates that the page calls measured or assumed."""

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.configs.load import load
from phalanx.configs.records import launch, own
from phalanx.configs.tables.machines import MACHINES, Machine, machine_named
from phalanx.extras.phases.configurations import configurations
from phalanx.extras.planner.certainty import LESS_KNOWN, ON_ONE_HOST, PUBLISHED, error_of, lines
from phalanx.extras.planner.search_page import search_page
from phalanx.moe.plan.cost.exchange import own_exchange
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved
from tests.extras.planner.pages import loaded, section, timed

STEP = "Expected step"
BALANCED = {name: r for name, r in own().items() if name.endswith("_balanced")}


@pytest.mark.parametrize("name", BALANCED)
def test_our_own_steps_are_within_what_is_said_of_them(name: str) -> None:
    world, overrides = launch(BALANCED[name].command)
    cfg, kind = load(overrides), BALANCED[name].hardware.split(" x ")[1].lower()
    error, _ = error_of(cfg, world, machine_named(kind))
    assert error == ON_ONE_HOST
    expected = timed(overrides, world, kind).total
    assert (
        BALANCED[name].step_time / (1 + error) < expected < BALANCED[name].step_time * (1 + error)
    )


def words(cfg_of: list[str], world: int, machine: Machine) -> dict[str, str]:
    """Lines by their first words."""
    cfg = resolved(load(cfg_of), world, machine.node_gpus)
    return dict(line.split(maxsplit=1) for line in lines(cfg, world, machine, 1000.0))


def test_a_host_of_measured_gpus_has_our_own_error() -> None:
    found = words(["experiment=qwen3_30b_8gpu"], 8, MACHINES["h200"])
    assert found["range"].startswith("952 to 1,050 tokens/s/GPU, 5% off")
    assert "network" not in found["measured"] and "assumed" not in found


ZERO3 = ["experiment=moonlight_8gpu", "parallel.distributed_optimizer=zero3", "parallel.expert=1"]


def test_long_sequences_are_within_what_is_said_of_them() -> None:
    """0.378 s a step of 32K on two H200s: docs/proof/long_context.md."""
    run = ["experiment=proof_moe_32k", "parallel.expert=1"]
    _, long = configurations(load(run), run)
    error, _ = error_of(long, 2, MACHINES["h200"])
    expected = timed(long, 2).total
    assert error == LESS_KNOWN
    assert expected / (1 + error) < 0.378 < expected * (1 + error)


def test_sharded_parameters_are_within_what_is_said_of_them() -> None:
    """0.4409 s a step on two H200s: docs/measured/training/two_h200s.txt."""
    run = [*ZERO3, "run=bench", "model.layers=8", "data.micro_batch=4", "data.global_batch=16"]
    cfg = load([*run, "optim.moments=bf16", "model.moe.router.force_balance=true"])
    error, _ = error_of(cfg, 2, MACHINES["h200"])
    expected = timed(cfg, 2).total
    assert error == LESS_KNOWN
    assert expected / (1 + error) < 0.4409 < expected * (1 + error)
    assert words(ZERO3, 8, MACHINES["h200"])["range"].startswith(
        "893 to 1,120 tokens/s/GPU, 12% off"
    )


def test_over_a_network_the_error_is_that_of_published_runs() -> None:
    found = words(["experiment=deepseek_v3_256gpu"], 256, MACHINES["h200"])
    assert found["range"].startswith(f"{1000 / (1 + PUBLISHED):,.0f} to 1,220 tokens/s/GPU")
    assert found["assumed"] == "network" and "node" in found["measured"]


def test_a_network_that_was_measured_is_marked_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kind: h200\nnetwork_gbs: 20\nlatency_us: 15\nmeasured: [network_gbs]\n")
    found = words(["experiment=deepseek_v3_256gpu"], 256, machine_named(str(path)))
    assert "network" in found["measured"].split(", ")
    assert found["assumed"] == "latency of the network"


def test_rates_of_a_gpu_that_was_never_seen_are_assumptions() -> None:
    found = words(["experiment=qwen3_30b_8gpu"], 8, machine_named("b200"))
    assert "measured" not in found and "every rate of the GPU is an assumption" in found["range"]
    assert "FP8" not in found["assumed"]
    fp8 = words(["experiment=qwen3_30b_8gpu", "precision=fp8_block"], 8, machine_named("b200"))
    assert "FP8 experts" in fp8["assumed"]


def test_links_that_were_measured_leave_the_error_of_several_hosts() -> None:
    """Our own steps, whose error is less, had one host."""
    links = {"node_gbs", "network_gbs", "latency_us"}
    h200 = replace(MACHINES["h200"], latency_us=15.0, measured=MACHINES["h200"].measured | links)
    found = words(["experiment=deepseek_v3_256gpu"], 256, h200)
    assert "assumed" not in found and "22% off either way as published runs are" in found["range"]
    b200 = replace(machine_named("b200"), measured=frozenset(links))
    given = ["experiment=gpt_oss_120b_64gpu"]
    assert "every rate of the GPU is an assumption" in words(given, 64, b200)["range"]


def test_experts_whose_rate_nobody_knows_are_said_to_be_slower() -> None:
    given = ["experiment=qwen3_30b_8gpu", "kernels=reference"]
    found = words(given, 8, MACHINES["h200"])["range"]
    assert "22% off" in found
    assert found.endswith("and slower, since these are rates of other experts than reference")
    for known in ("fused", "megatron"):
        assert "5% off" in words([given[0], f"kernels={known}"], 8, MACHINES["h200"])["range"]


def test_products_in_fp32_are_slower_and_no_rate_of_them_was_measured() -> None:
    """No tensor core multiplies them: an H100 has 67 TFLOP/s in fp32, and 989 in bf16."""
    page = section(STEP, "experiment=moonlight_8gpu", "precision=fp32", world=8)
    assert "  machine   65 TFLOP/s GEMM, 78 output layer, 56 experts" in page
    found = words(["experiment=moonlight_8gpu", "precision=fp32"], 8, MACHINES["h200"])
    assert found["assumed"] == "GEMM, output layer, experts, attention"
    assert found["measured"] == "memory, node" and "22% off" in found["range"]


def test_steps_that_are_not_captured_say_what_the_host_takes() -> None:
    given = ["experiment=qwen3_30b_8gpu", "run.graph=off"]
    slow = replace(MACHINES["h200"], launch_us=10.0)
    found = words(given, 8, slow)
    assert "host" not in words(given[:1], 8, slow)
    cfg = load(given)
    count = cfg.data.global_batch // cfg.data.micro_batch // 8
    assert found["host"].startswith(f"launches of a stage take {70 * 48 * count * 1e-5:.3f} s")


def test_the_page_has_the_range_and_the_marks(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("kind: h100\nnode_gbs: 100\nnetwork_gbs: 20\nmeasured: [node_gbs]\n")
    text = section(STEP, "experiment=qwen3_30b_8gpu", f"run.machine={path}", world=8)
    assert "  range     " in text and "100 node, 20 network" in text
    assert "\n  measured  " in text and "\n  assumed   " in text


def test_a_slower_network_and_latency_make_a_step_longer() -> None:
    cfg, h200 = load(["experiment=deepseek_v3_256gpu", "parallel.expert=16"]), MACHINES["h200"]
    known = resolved(cfg, 256, 8)
    slow, late = replace(h200, network_gbs=20), replace(h200, latency_us=50.0)
    fast = step_time(known, 256, h200).total
    assert step_time(known, 256, slow).total > fast
    before, after = (own_exchange(known, 256, m) for m in (h200, late))
    tokens = cfg.data.micro_batch * cfg.data.sequence_length
    assert (after.forward - before.forward) * tokens == pytest.approx(2 * 50e-6)
    one_host = resolved(load(["experiment=qwen3_30b_8gpu"]), 8, 8)
    assert step_time(one_host, 8, late) == step_time(one_host, 8, h200)


def test_a_search_has_natural_routing_and_a_range() -> None:
    words = ("experiment=gpt_oss_20b_8gpu",)
    text, code = search_page(loaded(*words), 8, words)
    first = next(line for line in text.splitlines() if line.startswith("1. "))
    fast, slow = (first[3:].split()[0], first.split("bf16, ")[1].split()[0])
    assert code == 0 and _number(slow) < _number(fast) and "with natural routing: " in first
    assert "\nof the first range" in text and "5% off either way" in text


def _number(text: str) -> float:
    return float(text.replace(",", ""))
