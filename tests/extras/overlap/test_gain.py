"""Overlap of micro-batches in estimates: what it hides, what it needs, when `auto` takes it."""

import re

import pytest

from phalanx.configs.knobs import changed
from phalanx.configs.layout import micro_batches
from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import ConfigError
from phalanx.moe.plan.cost.exchange import WAITING_COST
from phalanx.moe.plan.cost.stages import needed, stage_memory
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved
from phalanx.moe.plan.resolve import microbatch_overlap
from tests.extras.planner.pages import RUN, STEP, section
from tests.moe.plan.test_resolve import check_overlap

KNOB = "parallel.overlap_microbatches"
H200 = MACHINES["h200"]
NODES = ["experiment=qwen3_30b_8gpu", "parallel.expert=16", "parallel.dispatch=alltoall"]
"""Expert-parallel groups over two nodes."""
WORLD = 16


def known(*overrides: str, world: int = WORLD) -> Config:
    return resolved(load([*NODES, *overrides]), world, 8)


def pair(*overrides: str) -> tuple[Config, Config]:
    off = known(*overrides, f"{KNOB}=off")
    return off, changed(off, {KNOB: "on"})


def test_first_and_last_passes_are_exposed() -> None:
    """On links so fast that a pass hides the exchanges of the other."""
    off, on = pair("data.global_batch=128")
    fast = H200.__class__(**{**vars(H200), "network_gbs": 2000.0})
    before, after = (step_time(cfg, WORLD, fast) for cfg in (off, on))
    assert micro_batches(on, WORLD) == 8
    assert after.exchange == pytest.approx(before.exchange / 8)
    others = {name for name, value in vars(before).items() if vars(after)[name] != value}
    assert others == {"exchange", "experts", "skew"}


def test_experts_leave_sms_to_the_exchanges_beside_them() -> None:
    """Products are slower, and what takes the memory's time is not."""
    off, on = pair("data.global_batch=128", "data.micro_batch=4")
    before, after = (step_time(cfg, WORLD, H200) for cfg in (off, on))
    assert 1 < after.experts / before.experts <= 1 / 0.99
    assert after.gemm == before.gemm and after.attention == before.attention


def test_what_a_pass_is_too_short_to_hide_is_exposed() -> None:
    off, on = pair("data.global_batch=128", "parallel.delay_wgrad=off")
    slow = H200.__class__(**{**vars(H200), "network_gbs": 1.0})
    before, after = (step_time(cfg, WORLD, slow) for cfg in (off, on))
    computing = before.gemm + before.experts + before.attention + before.elementwise
    computing += before.gaps + after.experts - before.experts
    assert before.exchange / 8 < after.exchange < before.exchange
    # Both passes send the same bytes; a forward pass computes a third, beside 7 of 8 backward ones.
    assert before.exchange - after.exchange == pytest.approx(
        7 / 8 * (before.exchange / 2 + WAITING_COST * computing / 3)
    )


def test_activations_of_two_micro_batches_are_in_memory() -> None:
    off, on = pair()
    (before,), (after,) = (stage_memory(cfg, WORLD) for cfg in (off, on))
    assert after.saved == 2 * before.saved
    assert after.peak - before.peak == before.saved == needed(on, WORLD) - needed(off, WORLD)
    one = changed(on, {"data.global_batch": on.data.micro_batch * WORLD})
    assert stage_memory(one, WORLD)[0].saved == before.saved


@pytest.mark.parametrize(
    ("overrides", "value", "reason"),
    [
        ([], "on", "auto; hides "),
        ([f"{KNOB}=off"], "off", f"{KNOB}=off"),
        ([f"{KNOB}=on"], "on", f"{KNOB}=on; hides "),
        (["data.global_batch=16", "data.micro_batch=1"], "off", "auto; a step has one micro-batch"),
        (["parallel.dispatch=hier"], "on", "auto; hides "),
        (["parallel.dispatch=symm", "parallel.expert=8"], "off", "auto; symm overlaps its"),
        (["kernels=reference"], "off", "auto; reference experts have the host wait"),
        (["run.offload=[residual]"], "on", "auto; hides "),
        (["parallel.tensor=2"], "on", "auto; hides "),
        (["parallel.context=2"], "off", "auto; parallel.context=2 has one communicator"),
    ],
)
def test_auto_takes_it_where_it_helps(overrides: list[str], value: str, reason: str) -> None:
    wanted = load([*NODES, *overrides])
    cfg = changed(known(*overrides), {KNOB: wanted.parallel.overlap_microbatches})
    chosen, why = microbatch_overlap(cfg, WORLD, H200, H200.room)
    assert chosen == value and why().startswith(reason)
    assert known(*overrides).parallel.overlap_microbatches == value


def test_auto_leaves_it_where_it_does_not_fit_or_gain() -> None:
    cfg = changed(known(), {KNOB: "auto"})
    value, reason = microbatch_overlap(cfg, WORLD, H200, needed(cfg, WORLD))
    assert value == "off" and "would be needed" in reason()
    fast = H200.__class__(**{**vars(H200), "network_gbs": 1e6, "node_gbs": 1e6})
    value, reason = microbatch_overlap(cfg, WORLD, fast, H200.room)
    assert value == "off" and "not worth it" in reason()
    on_cpu = changed(cfg, {"run.device": "cpu"})
    assert microbatch_overlap(on_cpu, WORLD, H200, H200.room)[0] == "off"


def test_forced_overlap_that_cannot_run_is_an_error() -> None:
    cfg = changed(known("parallel.context=2"), {KNOB: "on"})
    with pytest.raises(ConfigError, match=f"{KNOB}=on cannot run: .* set {KNOB}=auto"):
        microbatch_overlap(cfg, WORLD, H200, H200.room)


def test_the_page_says_what_it_hides_and_costs() -> None:
    text = section((RUN, STEP), *NODES, world=WORLD)
    effect = re.search(r"the next micro-batch hides (\d+)% of exchanges, (\d+)% of the step", text)
    assert effect and 50 < int(effect[1]) < 100 and int(effect[2]) >= 3
    assert "alltoall exchanges overlapped with another micro-batch" in text
    text = section((RUN, STEP), *NODES, f"{KNOB}=off", world=WORLD)
    assert "next micro-batch" not in text and "alltoall exchanges of the backward pass" in text


def test_all_ranks_overlap_where_it_is_on() -> None:
    check_overlap("on", "alltoall", "overlap; {knob}=on; hides ")
