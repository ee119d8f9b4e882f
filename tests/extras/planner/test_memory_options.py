"""Savings and cost of parts of layers, and the sets of them that a dry run proposes."""

import shlex
from dataclasses import replace

import pytest

from phalanx.configs.knobs import knobs
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import validate
from phalanx.extras.planner.advice import suggestions
from phalanx.extras.planner.memory_options import MemoryOption, memory_options
from phalanx.moe.plan.cost.activations import Activations
from phalanx.moe.plan.cost.exchange import WAITING_COST
from phalanx.moe.plan.cost.stages import host_needed, needed, stage_memory
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.cost.weights import LayerKind
from phalanx.moe.plan.described import resolved
from tests.extras.planner.pages import MEMORY, fitting, section

H100 = MACHINES["h100"]
MOE = LayerKind(dense=False, fp8=False)
DENSE = LayerKind(dense=True, fp8=False)
DEEPSEEK = ["model=deepseek_v3_l4", "data.sequence_length=4096", "data.micro_batch=1"]
DEEPSEEK += ["data.global_batch=8", "kernels=fused", "run=bench", "data=synthetic"]


def known(*overrides: str, world: int = 8) -> Config:
    cfg = load(overrides)
    validate(cfg, world)
    return resolved(cfg, world, 8)


def options_of(cfg: Config, world: int = 8) -> dict[str, MemoryOption]:
    return {f"{p.knob}={p.name}": p for p in memory_options(cfg, world, MACHINES["h200"])}


def test_what_each_part_frees_in_a_layer() -> None:
    """Written out once, for a token of DeepSeek-V3 in bf16 by the fused kernels."""
    act = Activations(known(*DEEPSEEK), 8)
    queries_keys_values = 2 * 128 * (192 + 192 + 128)
    rows = act.sizes.rows / 4096
    of_moe = {
        "norm": 2 * 2 * 7168,
        "mla_up": queries_keys_values + 2 * (1536 + 512),
        "attention": 2 * 128 * 128 + 4 * 128,
        "mlp": 2 * 2 * 2048,
        "expert_h": rows * 2 * 2 * 2048,
    }
    for name, size in of_moe.items():
        assert act.bytes_freed(name)[MOE] == 4096 * size, name
    assert act.bytes_freed("mlp")[DENSE] == 4096 * 2 * 2 * 18432
    assert act.bytes_freed("expert_h")[DENSE] == act.bytes_freed("moe")[DENSE] == 0
    parts = [act.bytes_freed(name)[MOE] for name in ("mlp", "expert_h")]
    assert act.bytes_freed("moe")[MOE] > sum(parts)
    whole = act.per_layer_kind()[MOE].saved - 4096 * 2 * 7168
    assert act.bytes_freed("full")[MOE] == whole


def test_norms_that_are_computed_again_spare_inputs_in_fp8_too() -> None:
    """Linear layers then keep what they are given, which is given up; routed experts their rows."""
    fp8 = [*DEEPSEEK, "precision=fp8_block"]
    kept, norm = (
        Activations(known(*fp8, f"run.recompute={names}"), 8).moe_layer().saved
        for names in ("none", "norm")
    )
    plain = Activations(known(*DEEPSEEK), 8)
    norm_bf16 = Activations(known(*DEEPSEEK, "run.recompute=norm"), 8).moe_layer().saved
    assert kept - norm > plain.moe_layer().saved - norm_bf16
    received = norm - norm_bf16
    assert received == kept - plain.moe_layer().saved - (kept - norm) + 4096 * 2 * 2 * 7168


@pytest.mark.parametrize("name", ["moonlight_8gpu", "qwen3_30b_8gpu", "gpt_oss_20b_8gpu"])
def test_what_is_said_of_a_part_is_what_it_does(name: str) -> None:
    cfg, machine = known(f"experiment={name}", "run.recompute=none"), MACHINES["h200"]
    found = options_of(cfg)
    assert {"run.recompute=norm", "run.recompute=expert_h", "run.offload=residual"} < set(found)
    assert ("run.recompute=mla_up" in found) == (cfg.model.attention.kind == "mla")
    assert "run.recompute=moe_act" not in found
    order = [p.seconds / p.saved for p in found.values()]
    assert order == sorted(order)
    (before,), seconds = stage_memory(cfg, 8), step_time(cfg, 8, machine).total
    for override, part in found.items():
        other = known(f"experiment={name}", "run.recompute=none", override)
        (after,) = stage_memory(other, 8)
        assert before.peak - after.peak == part.saved > 0
        assert step_time(other, 8, machine).total - seconds == pytest.approx(part.seconds)
        assert part.seconds >= 0 and (after.host > 0) == (part.knob == "run.offload")
    assert found["run.recompute=full"].seconds > found["run.recompute=moe"].seconds
    assert found["run.recompute=moe"].seconds > found["run.recompute=expert_h"].seconds > 0


def test_copies_that_find_nothing_to_run_beside_are_waited_for() -> None:
    cfg, machine = known("experiment=moonlight_8gpu", "run.offload=expert_h"), MACHINES["h200"]
    slow, fast = (replace(machine, host_gbs=rate) for rate in (1.0, 1e6))
    waits = [step_time(cfg, 8, m).offload for m in (slow, machine, fast)]
    assert waits[0] > waits[1] >= waits[2] == 0
    moved = stage_memory(cfg, 8)[0].host
    micro_batches = cfg.data.global_batch // 8 // cfg.data.micro_batch
    busy = step_time(cfg, 8, fast)
    whole = busy.gemm + busy.experts + busy.attention + busy.elementwise + busy.gaps
    whole += busy.exchange / WAITING_COST
    assert waits[0] == pytest.approx(2 * micro_batches * moved / 1e9 - whole, rel=1e-6)


def test_what_waits_on_the_host_is_held_by_all_micro_batches_in_flight() -> None:
    cfg = known(
        "experiment=deepseek_v3_256gpu", "run.recompute=none", "run.offload=residual", world=256
    )
    nothing = ["run.recompute=none", "run.offload=none"]
    kept = known("experiment=deepseek_v3_256gpu", *nothing, world=256)
    moved, whole = stage_memory(cfg, 256), stage_memory(kept, 256)
    two = 2 * 2 * 2 * 4096 * 7168
    for less, more in zip(moved, whole, strict=True):
        # Each at its most, which the last stage has at different times.
        assert more.saved <= less.saved + less.host < 1.01 * more.saved
        assert less.backward == more.backward + two
    assert host_needed(cfg, 256) == max(m.host for m in moved) > 20 * two


# --- proposals ------------------------------------------------------------------------------------

BARS = {"deepseek_v3_256gpu": 256, "qwen3_235b_64gpu": 64}
OF_MEMORY = {"run.recompute", "run.offload", "optim.moments", "parallel.grad_dtype"}


@pytest.mark.parametrize("name", BARS)
def test_large_models_fit_80_gb_with_what_is_proposed(name: str) -> None:
    """On the same ranks in the same layout, with nothing but parts and states that take less."""
    world, given = BARS[name], [f"experiment={name}", "run.machine=h100"]
    assert H100.memory_gib < 80e9 / 2**30 * 1.07
    assert not fitting(*given, world=world)
    assert "does not fit" in section(MEMORY, *given, world=world)
    found = [
        (each.overrides, each.size)
        for each in suggestions(load(given), world, H100, H100.room)
        if {word.split("=")[0] for word in shlex.split(each.overrides)} <= OF_MEMORY
        and "run." in each.overrides
    ]
    ((overrides, size),) = found
    again = load([*given, *shlex.split(overrides)])
    assert size == needed(resolved(again, world, 8), world) <= H100.room
    assert "full" not in again.run.recompute and "moe" not in again.run.recompute
    given += shlex.split(overrides)
    assert fitting(*given, world=world) and ": fits" in section(MEMORY, *given, world=world)
    # Cheaper than computing whole layers again.
    full = load([*given, "run.recompute=full", "run.offload=none"])
    spent, whole = (step_time(resolved(c, world, 8), world, H100).total for c in (again, full))
    assert spent < whole


def test_every_part_of_a_proposal_is_needed() -> None:
    given = ["experiment=qwen3_30b_8gpu", "run.machine=h100", "run.eval_interval=0"]
    found = suggestions(load(given), 8, H100, H100.room)
    (overrides,) = [each.overrides for each in found if "run." in each.overrides]
    chosen = dict(word.split("=", 1) for word in shlex.split(overrides))
    assert set(chosen) <= set(knobs())
    for knob in OF_MEMORY & set(chosen) & {"run.recompute", "run.offload"}:
        names = chosen[knob].strip("[]").split(",")
        for name in names:
            fewer = f"{knob}=[{','.join(n for n in names if n != name)}]"
            cfg = load([*given, *shlex.split(overrides), fewer])
            assert needed(resolved(cfg, 8, 8), 8) > H100.room


def test_hosts_without_memory_get_no_copies() -> None:
    small = replace(H100, host_gib=0.5)
    given = ["experiment=qwen3_30b_8gpu", "run.machine=h100", "run.eval_interval=0"]
    found = suggestions(load(given), 8, small, small.room)
    (overrides,) = [each.overrides for each in found if "run." in each.overrides]
    assert "run.offload" not in overrides and "run.recompute=" in overrides


def test_the_page_names_parts_and_assumptions() -> None:
    given = ["experiment=moonlight_8gpu", "run.recompute=norm", "run.offload=residual"]
    text = section("Activations to recompute or offload", *given, world=8)
    lines = [line.split() for line in text.splitlines() if line.startswith("  run.")]
    assert [line[0] for line in lines if line[-1] == "set"] == sorted(
        ["run.offload=residual", "run.recompute=norm"],
        key=[line[0] for line in lines].index,
    )
    assert "of 200 GiB (assumed), copied at 50 GB/s each way (assumed)" in text
