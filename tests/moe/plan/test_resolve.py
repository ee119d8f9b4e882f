"""Decisions of a plan: what one rank cannot do none does, and what fits on all ranks is taken."""

import math
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from phalanx.configs.knobs import changed
from phalanx.configs.load import load
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError
from phalanx.moe.plan.cost.stages import needed
from phalanx.moe.plan.resolve import resolve
from tests.moe.plan.jobs import BARE, CPU, GPU, job, known, line, planned, without
from tests.support.additions import COUNTING_TRANSPORTS

CAPTURED = "captured after 2 eager steps, which takes seconds"


def test_a_plan_leaves_the_configuration_as_it_was_and_has_no_auto() -> None:
    cfg = load([])
    plan = resolve(cfg, job(ranks=2))
    assert cfg == load([])
    k, p = plan.cfg.kernels, plan.cfg.parallel
    assert (k.backend, k.attention, k.norm) == ("fused", "fa4", "quack")
    assert (p.dispatch, p.comm_sms, p.delay_wgrad, p.overlap_microbatches) == (
        *("symm", 16),
        *("off", "off"),
    )
    assert (plan.cfg.run.device, plan.cfg.run.graph) == ("cuda", "full_iteration")


def test_all_ranks_run_the_kernels_that_each_of_them_can() -> None:
    alone, both = planned(facts=job(BARE, BARE)), planned(facts=job(GPU, BARE))
    for plan in (alone, both):
        k = plan.cfg.kernels
        assert (k.backend, k.attention, k.norm) == ("torch", "sdpa", "torch")
        assert plan.exchange(0).comm_sms == 0  # torch's experts cannot wait for tokens
    assert line(both, "grouped_mlp") == line(alone, "grouped_mlp") + " (rank 1)"
    with pytest.raises(
        ConfigError, match=r"kernels\.backend=fused cannot run here: needs the comp"
    ):
        planned("kernels.backend=fused", facts=job(GPU, BARE))


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (dict(facts=job(CPU, CPU)), "needs CUDA"),
        (
            dict(overrides=["kernels.backend=reference"]),
            "reference experts count their rows on the ",
        ),
        (
            dict(overrides=["parallel.dispatch=broadcasts"]),
            "parallel.dispatch=broadcasts counts rows on ",
        ),
    ],
)
def test_steps_are_captured_where_they_can_be(given: dict[str, Any], reason: str) -> None:
    assert line(planned(), "graph") == f"full_iteration; auto; {CAPTURED}"
    forced = "run.graph=full_iteration"
    assert line(planned(forced), "graph") == f"full_iteration; {forced}; {CAPTURED}"
    assert line(planned("run.graph=off"), "graph") == "off; run.graph=off"
    overrides, facts = given.get("overrides", []), given.get("facts")
    plan = planned(*overrides, facts=facts)
    assert not plan.captured
    assert line(plan, "graph").startswith(f"off; auto; not full_iteration: {reason}")
    with pytest.raises(ConfigError, match=f"{forced} cannot run: {reason}.*; set run.graph=auto"):
        planned(forced, *overrides, facts=facts)


def test_groups_of_different_nodes_may_exchange_in_different_ways() -> None:
    cfg = ["parallel.expert=2", "data.global_batch=24", "model=tiny"]
    cfg += ["parallel.overlap_microbatches=off"]
    plan = planned(*cfg, facts=job(ranks=6, node_ranks=3))  # the second group is on two nodes
    assert [t.name for t in plan.transports] == ["symm", "hier", "symm"]
    assert [plan.transport(rank).name for rank in range(6)] == ["symm"] * 2 + ["hier"] * 2 + [
        "symm",
        "symm",
    ]
    assert "; 1 of 3 groups differ: that of rank 2 takes hier" in plan.transports[0].reason
    refusing = job(GPU, without(GPU, symm="rows are too wide"))
    assert planned(facts=refusing).transport(0).name == "alltoall"
    with pytest.raises(ConfigError, match=r"^parallel\.dispatch=symm cannot .*rows are too wide"):
        planned("parallel.dispatch=symm", facts=refusing)


def test_megatron_core_has_its_own_dispatcher() -> None:
    plan = planned("kernels=megatron", "parallel.dispatch=symm")
    assert plan.transport(1).name == "megatron"
    assert line(plan, "transport").endswith("; parallel.dispatch=symm is not in effect")
    by = "Transformer Engine's grouped GEMM"
    assert line(plan, "grouped_mlp") == f"megatron; kernels.backend=megatron; {by}"
    here = job(BARE, BARE)
    assert line(planned("kernels=megatron", facts=here), "grouped_mlp").endswith(
        "a loop over experts"
    )
    dense = planned("kernels=megatron", "model=tiny_dense")
    assert line(dense, "grouped_mlp") == "megatron; kernels.backend=megatron"


FP8 = ["precision=fp8_block"]


def test_fp8_copies_of_weights_are_where_they_fit_on_all_ranks() -> None:
    def told(*more: str, free: tuple[int, ...] = (2**40, 2**40)) -> str:
        return line(planned(*FP8, *more, facts=job(free=free)), "fp8 weights")

    all_kept = r"resident; auto; with .* of 993\.3 GiB would be needed"
    assert re.fullmatch(all_kept, told("model.moe.router.force_balance=true"))
    assert re.fullmatch(f"{all_kept} at capacity_factor 3", told())
    assert told(free=(0, 0)).startswith("scratch; auto; with resident weights ")
    cfg = changed(known(*FP8), {"parallel.capacity_factor": 3.0})  # room for natural routing
    # A hundredth of a layer is missing; 3 % of free memory are not for tensors.
    most, least = (
        needed(changed(cfg, {"precision.weights": each}), 2) for each in ("resident", "scratch")
    )
    short_of_one = int((most - (most - least) / cfg.model.layers / 100) / 0.97)
    of = cfg.model.layers
    assert told(free=(short_of_one, 2**40)).startswith(f"resident in {of - 1} of {of} layers; auto")
    assert told(free=(2**40, 0)).startswith("scratch; ")
    assert told(free=(2**40, 0)).endswith("factor 3 on rank 1")
    assert told("precision.weights=resident", free=(0, 0)) == "resident; precision.weights=resident"
    assert told("kernels=megatron").startswith("resident; auto; Transformer Engine keeps its own")
    emulated = "torch experts multiply values of FP8 in bf16"
    assert told("kernels=torch") == f"none; auto; {emulated}"
    forced = told("precision.weights=scratch", "kernels=torch")
    assert forced == f"none; {emulated}; precision.weights=scratch is not in effect"
    assert line(planned(), "fp8 weights") == ""


@pytest.mark.parametrize(
    ("value", "dispatch", "start"),
    [
        ("off", "alltoall", "in turn; {knob}=off"),
        ("auto", "symm", ""),
        ("auto", "alltoall", ""),  # on a CPU
    ],
)
def test_micro_batches_overlap_on_all_ranks_or_none(value: str, dispatch: str, start: str) -> None:
    check_overlap(value, dispatch, start)


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
def check_overlap(value: str, dispatch: str, start: str) -> None:
    """Compare a plan of two ranks with the value of the knob, and the start of its line."""
    knob = "parallel.overlap_microbatches"
    given = ["model=tiny", "parallel.expert=2", f"{knob}={value}", f"parallel.dispatch={dispatch}"]
    facts = job(CPU, CPU) if dispatch == "alltoall" else None
    plan = planned(*given, facts=facts)
    assert line(plan, "micro-batches").startswith(start.format(knob=knob))
    assert bool(line(plan, "micro-batches")) == (value != "auto")
    assert plan.overlaps == (value == "on")
    assert (plan.margins.forward, plan.exchange(0).two_passes) == (
        (8, True) if plan.overlaps else (0, False)
    )
    refused = rf"{knob}=on cannot run: parallel\.dispatch=broadcasts has one "
    with pytest.raises(ConfigError, match=refused):
        planned("model=tiny", "parallel.expert=2", f"{knob}=on", "parallel.dispatch=broadcasts")


MANY = ["data.micro_batch=8", "model.moe.experts=4", "model.moe.top_k=2"]  # rows of an expert
MANY += ["data.sequence_length=1024", "data.global_batch=64"]
STAGES = "parallel.pipeline=2"


def wgrad(*overrides: str, free: tuple[int, ...] = (2**40, 2**40), **devices: Any) -> str:
    facts = job(*devices.get("on", ()), free=free)
    return line(planned(*overrides, facts=facts), "wgrad")


def test_weight_gradients_wait_if_their_operands_fit_on_all_ranks() -> None:
    waits = r"on; auto; .*; with their operands .* of 1003\.9 GiB would be needed"
    assert re.fullmatch(waits, wgrad(STAGES, *MANY))
    short = wgrad(STAGES, *MANY, free=(2**40, 0))
    assert short.startswith("off; auto; with their operands ")
    assert short.endswith(" of 0 bytes would be needed on rank 1")
    assert (
        wgrad(STAGES, free=(0, 0), on=(CPU,)) == "on; auto; while a stage would wait for transfers"
    )
    on, off = "parallel.delay_wgrad=on", "parallel.delay_wgrad=off"
    assert wgrad(STAGES, on, free=(0, 0)) == f"on; {on}"
    assert wgrad(STAGES, off) == f"off; {off}"
    why = "kernels=megatron computes them in the backward pass"
    assert wgrad(STAGES, "kernels=megatron") == f"off; parallel.delay_wgrad=auto; {why}"
    assert wgrad("parallel.pipeline=1") == ""


def test_stages_hold_as_many_passes_as_memory_is_spared() -> None:
    plan = planned("model=qwen3_30b_a3b", "parallel.pipeline=4", facts=job(ranks=4))
    assert [plan.waiting(stage).held for stage in range(4)] == [0, 1, 2, 3]
    assert planned(*MANY).held == (None,)


def test_weight_gradients_of_two_micro_batches_where_experts_have_few_rows() -> None:
    pairs, setting = "parallel.delay_wgrad=pairs", "pairs; parallel.delay_wgrad=pairs"
    alone = [STAGES, "parallel.dispatch=local"]
    assert re.fullmatch(
        r"pairs; auto; .*for two micro-batches at once; with their .*", wgrad(*alone)
    )
    assert planned(*alone).pairs
    cfg = known(*alone)
    need = {
        value: needed(changed(cfg, {"parallel.delay_wgrad": value}), 2) for value in ("pairs", "on")
    }
    assert need["on"] < need["pairs"]
    for size, start in (
        (need["pairs"], "pairs"),
        (need["pairs"] - 1, "on"),
        (need["on"] - 1, "off"),
    ):
        free = math.ceil(1.02 * size)  # the estimate's error stays free
        assert wgrad(*alone, free=(free, free)).startswith(f"{start}; auto; ")
    assert wgrad(*alone, "kernels=torch").startswith("on; auto; ")
    assert wgrad(*alone, pairs, free=(0, 0)) == wgrad(*alone, pairs, "kernels=torch") == setting
    assert wgrad(pairs, "parallel.expert=1") == setting
    exchanging = [pairs, "parallel.expert=2", "parallel.dispatch=alltoall"]
    assert wgrad(*exchanging) == setting
    once = wgrad(*exchanging, "data.micro_batch=4", "data.global_batch=8")
    beside = "overlap; exchanges of the backward pass"
    assert once == f"{beside}; {pairs}; a step has one micro-batch"
    for more, why in (
        (["parallel.expert=1", "data.global_batch=8"], "a step has one micro-batch"),
        (["parallel.expert=2"], "parallel.dispatch=symm reuses its buffers of expert rows"),
    ):
        assert wgrad(pairs, "data.micro_batch=4", *more) == f"off; {pairs}; {why}"


@pytest.mark.parametrize("length", [3072, 3584])
def test_pairs_are_chosen_by_the_rates_of_the_gpus_that_run(length: int) -> None:
    given = ["model=qwen3_30b_a3b", STAGES, "parallel.expert=4", "parallel.dispatch=alltoall"]
    given += [f"data.sequence_length={length}", "data.micro_batch=1", "run.machine=h200"]
    given += ["parallel.overlap_microbatches=off"]
    h100 = replace(GPU, machine=MACHINES["h100"])
    assert known(*given, facts=job(h100, ranks=8)).parallel.delay_wgrad == "pairs"
    assert known(*given, facts=job(GPU, ranks=8)).parallel.delay_wgrad == "on"
    assert known(*given, facts=job(GPU, h100, ranks=8)).parallel.delay_wgrad == "pairs"
