"""Estimates of states in host memory: slots, what stays on the GPU, copies, and the host."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import ConfigError
from phalanx.extras.host_states import entry, estimate
from phalanx.extras.planner.dry_run import dry_run
from phalanx.moe.plan.cost.stages import fits, host_needed, needed, stage_memory
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.cost.weights import checkpoint_bytes, stage_weights
from phalanx.moe.plan.described import resolved
from phalanx.moe.plan.facts import FreeMemory, JobFacts, described
from phalanx.moe.text import storage
from tests.support.distributed import run_distributed

DOCS = Path(__file__).resolve().parents[3] / "docs" / "memory.md"
GIB = 2**30
H100, H200 = MACHINES["h100"], MACHINES["h200"]
ON_EIGHT = [
    *("run.machine=h100", "parallel.world_size=8", "parallel.pipeline=1"),
    *("parallel.virtual_pipeline=1", "parallel.grad_dtype=bf16", "optim.moments=bf16_host"),
]
GPT_OSS = ["experiment=gpt_oss_120b_64gpu", *ON_EIGHT, "parallel.expert=8"]
GPT_OSS += ["run.recompute=expert_h", "run.eval_interval=0"]
FULL = [*ON_EIGHT, "run.recompute=full", "run.offload=residual"]
GLM = ["experiment=glm_4_5_air_32gpu", *FULL, "parallel.expert=8", "parallel.tensor=2"]
QWEN = ["experiment=qwen3_235b_64gpu", *FULL, "parallel.tensor=8"]
SIX = ["experiment=gpt_oss_120b_64gpu", "model.layers=6", "parallel.expert=2"]
SIX += ["parallel.pipeline=1", "parallel.virtual_pipeline=1", "data.micro_batch=4"]


def known(overrides: list[str], world: int) -> Config:
    return resolved(load(overrides), world, 8)


def test_states_are_counted_on_the_host_and_slots_on_the_gpu() -> None:
    for moments in ("fp32", "bf16"):
        here, there = (known([*SIX, f"optim.moments={moments}{w}"], 2) for w in ("", "_host"))
        (on_gpu,), (on_host,) = stage_weights(here, 2), stage_weights(there, 2)
        assert on_host.hosted_bytes == on_host.optimizer_bytes == on_gpu.optimizer_bytes
        assert on_host.device_states == 4 * (32 << 20) * (12 if moments == "fp32" else 6)
        assert on_gpu.device_states == on_gpu.optimizer_bytes and not on_gpu.hosted_bytes
        freed = on_gpu.device_states - on_host.device_states
        assert needed(here, 2) - needed(there, 2) == freed
        assert host_needed(there, 2) - host_needed(here, 2) == on_host.hosted_bytes
        assert checkpoint_bytes(here) == checkpoint_bytes(there)


def _slots(overrides: list[str]) -> tuple[int, int]:
    """Bytes of slots, and by the estimate."""
    from phalanx.extras.host_states import optimizer
    from phalanx.extras.muon import optimizer as muon
    from phalanx.moe.run.setup import setup
    from phalanx.parallel.megatron.updated import parts
    from phalanx.parallel.runtime import start

    few, together = 40_000, 80_000
    patches = [mock.patch.object(module, "ELEMENTS", few) for module in (optimizer, estimate)]
    patches += [mock.patch.object(muon, "_SLICE", together)]
    patches += [mock.patch.object(estimate, "TOGETHER", together)]
    for patch in patches:
        patch.start()
    try:
        cfg = load(overrides)
        job = setup(cfg, start(seed=1, timeout=60, deterministic=False))
        (weights,) = stage_weights(cfg, 1)
        return parts(job.engine.optimizer)[0].optimizer.stream.device_bytes, weights.device_states
    finally:
        for patch in patches:
            patch.stop()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("moments", ["fp32_host", "bf16_host"])
def test_slots_are_as_estimated(kind: str, moments: str) -> None:
    if kind == "muon":
        pytest.importorskip("emerging_optimizers")
    small = ["model=tiny", "run.device=cpu", "precision=bf16", "model.hidden=64"]
    given = [*small, f"optim.kind={kind}", f"optim.moments={moments}"]
    ((held, expected),) = run_distributed(_slots, 1, given)
    expected -= 10 * 80_000 if kind == "muon" else 0  # for products
    assert 0.8 * expected < held < 1.05 * expected  # whole matrices fill no batch to its end


def test_muons_matrices_are_as_many_at_a_time() -> None:
    from phalanx.extras.muon import optimizer as muon

    assert muon._SLICE == estimate.TOGETHER


def test_what_fits_stays_and_the_rest_travels() -> None:
    cfg = known([*SIX, "optim.moments=fp32_host"], 2)
    (weights,) = stage_weights(cfg, 2)
    room = estimate.room_of(cfg, 2, H200.room)
    assert 30 * GIB < room < weights.hosted_bytes
    assert needed(cfg, 2) + room < 0.97 * H200.room
    assert estimate.room_of(cfg, 2, needed(cfg, 2)) == 0
    assert estimate.room_of(cfg, 2, 10**12) == weights.hosted_bytes
    travels = weights.hosted_bytes - room - weights.device_states
    assert step_time(cfg, 2, H200).optimizer == pytest.approx(travels / 50e9)
    small = known([*SIX, "optim.moments=bf16_host", "model.layers=2"], 2)
    on_gpu = known([*SIX, "optim.moments=bf16", "model.layers=2"], 2)
    assert step_time(small, 2, H200).optimizer == step_time(on_gpu, 2, H200).optimizer


@pytest.mark.parametrize("overrides", [GPT_OSS, GLM, QWEN], ids=["gpt_oss", "glm", "qwen"])
def test_the_page_has_the_figures_of_dry_runs(overrides: list[str]) -> None:
    text, code = dry_run(load(overrides), 8)
    cfg = known(overrides, 8)
    assert (code == 0) == fits(cfg, 8, H100) == (overrides is not QWEN)
    size = needed(cfg, 8) / GIB + H100.reserved_gib
    node = 8 * stage_weights(cfg, 8)[0].hosted_bytes
    named = {"120b": "GPT-OSS-120B", "air": "GLM-4.5-Air", "235b": "Qwen3-235B"}
    (name,) = (shown for part, shown in named.items() if part in overrides[0])
    (row,) = (line for line in DOCS.read_text("utf-8").split("\n") if f"| {name} |" in line)
    assert f"| {size:.1f} | {node / GIB:,.0f} |" in row
    if overrides is QWEN:
        weights = stage_memory(cfg, 8)[0].weights
        each = [weights.parameter_bytes / GIB, weights.gradient_bytes / GIB]
        assert f"2 x {each[0]:.1f}" in row and each[0] == each[1]
    else:
        step = step_time(cfg, 8, H100)
        assert f"{step.optimizer:.1f} s of {step.total:.0f} s" in row
    assert f"{storage(node)} of a node of 8 GPUs" in text


def test_a_dry_run_says_what_is_where() -> None:
    text, _ = dry_run(load([*SIX, "optim.moments=bf16_host"]), 2)
    (line,) = (each for each in text.split("\n") if "of the optimizer in host memory" in each)
    assert "57.1 GiB of a rank" in line and "114.2 GiB of a node of 2 GPUs" in line
    saved, _ = dry_run(load([*GPT_OSS, "run.async_save=off"]), 8)
    assert "with a background checkpoint 1.5 TiB" in dry_run(load(GPT_OSS), 8)[0]
    assert "background checkpoint" not in saved


@pytest.mark.parametrize(
    ("moments", "helps"),
    [("fp32_host", "set optim.moments=bf16_host or use more hosts"), ("bf16_host", ": use more")],
)
def test_states_that_no_host_can_hold_are_refused(moments: str, helps: str) -> None:
    cfg = load([*SIX, f"optim.moments={moments}"])
    facts = described(cfg, 2, H200)

    def with_host(free: int) -> JobFacts:
        host = FreeMemory("this host", free)
        return replace(facts, ranks=tuple(replace(r, host_memory=host) for r in facts.ranks))

    entry.check_hosts(cfg, with_host(240 * GIB))
    with pytest.raises(ConfigError, match=helps) as error:
        entry.check_hosts(cfg, with_host(100 * GIB))
    text = str(error.value)
    assert "states of 2 ranks take" in text and "100.0 GiB free" in text and "\n" not in text


def _refused(overrides: list[str]) -> str:
    """The message of a run on a host that is full."""
    from phalanx.moe.plan import facts

    full = FreeMemory("this host", 2 << 20)
    with mock.patch.object(facts, "free_host_memory", return_value=full):
        from phalanx.moe.plan.described import agreed_plan
        from phalanx.moe.run.memory_check import check_memory
        from phalanx.parallel.runtime import start

        cfg = load(overrides)
        plan, found = agreed_plan(cfg, start(seed=1, timeout=60, deterministic=False))
        try:
            check_memory(cfg, plan, found)
        except ConfigError as error:
            return str(error)
        return ""


def test_a_run_checks_its_hosts() -> None:
    (text,) = run_distributed(_refused, 1, ["model=tiny", "optim.moments=fp32_host"])
    assert "with optim.moments=fp32_host the states of 1 rank take" in text
