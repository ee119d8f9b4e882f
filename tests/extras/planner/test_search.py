"""`run.dry_run=search`: its commands are valid, fit, and are as fast as it says."""

import re
import shlex
from dataclasses import replace
from itertools import product

import pytest

from phalanx import train
from phalanx.configs.arithmetic.accounting import parameters
from phalanx.configs.knobs import changed
from phalanx.configs.layout import ranks_of_experiment
from phalanx.configs.load import load, options
from phalanx.configs.records import launch
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import validate
from phalanx.extras.planner.best import Found, best, estimated, next_override, sets_of, told_apart
from phalanx.extras.planner.layouts import layouts
from phalanx.extras.planner.search_page import search_page
from phalanx.moe.plan.cost.stages import host_needed, needed
from phalanx.moe.plan.cost.step_time import step_time
from phalanx.moe.plan.described import resolved
from tests.extras.planner.pages import EXPERTS, PUBLISHED_V3, STEP, fitting, section

H100 = MACHINES["h100"]
LARGE = ["experiment=deepseek_v3_256gpu", "parallel.expert=4"]
QWEN = ["experiment=qwen3_30b_8gpu", "run.machine=h100"]


def searched(*words: str, world: int) -> tuple[list[tuple[float, str]], str, int]:
    """(tokens/s/GPU, command) of what is found, the page, and the exit code."""
    cfg = load([*words, "run.dry_run=search"])
    validate(cfg, world)
    text, code = search_page(cfg, world, [*words, "run.dry_run=search"])
    found = re.findall(r"^\d\. ([\d,]+) tokens/s/GPU.*\n(torchrun .*)$", text, re.M)
    return [(float(rate.replace(",", "")), command) for rate, command in found], text, code


@pytest.mark.parametrize(
    ("words", "world"),
    [
        (["experiment=moonlight_8gpu"], 8),
        pytest.param(QWEN, 8, marks=pytest.mark.slow),
        pytest.param(
            ["experiment=gpt_oss_120b_64gpu", "run.machine=h100"], 64, marks=pytest.mark.slow
        ),
        pytest.param(
            ["experiment=deepseek_v3_1024gpu", "run.machine=h100", "precision=fp8_block"],
            1024,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_command_is_valid_and_fits(words: list[str], world: int) -> None:
    found, text, code = searched(*words, world=world)
    assert len(found) == 5 and code == 0, text
    rates = [rate for rate, _ in found]
    assert rates == sorted(rates, reverse=True)
    for rate, command in found:
        ranks, overrides = launch(command)
        assert ranks == world and not any("dry_run" in word for word in overrides)
        assert fitting(*overrides, world=world)
        text = section(STEP, *overrides, world=world)
        (again,) = re.findall(r"^  step .* s: ([\d,]+) tokens/s/GPU", text, re.M)
        assert float(again.replace(",", "")) == rate


@pytest.mark.parametrize(
    ("world", "launched"),
    [(12, "--nnodes 2 --nproc-per-node 6"), (6, "--standalone --nproc-per-node 6")],
)
def test_a_command_starts_as_many_ranks_on_each_host(world: int, launched: str) -> None:
    words = ["experiment=moonlight_8gpu", "model.layers=4", "data.global_batch=96"]
    text, code = search_page(load(words), world, words)
    commands = re.findall(r"^torchrun .*", text, re.M)
    assert code == 0 and commands
    assert all(each.startswith(f"torchrun {launched} train.py") for each in commands)


@pytest.mark.parametrize("moments", ["bf16_host", "fp32_host"])
def test_states_in_host_memory_are_searched_too(moments: str) -> None:
    words = ["experiment=moonlight_8gpu", "model.layers=4", f"optim.moments={moments}"]
    found, _, code = searched(*words, world=8)
    assert code == 0
    for rate, command in found[:2]:
        _, overrides = launch(command)
        (again,) = re.findall(r"^  step .* s: ([\d,]+) ", section(STEP, *overrides, world=8), re.M)
        assert float(again.replace(",", "")) == rate


def test_the_best_layout_beats_the_published_one() -> None:
    """DeepSeek-V3 on 1,024 H100s: the bar is 1,061 tokens/s/GPU, the goal 1,270."""
    cfg = load(PUBLISHED_V3)
    (found,) = best(cfg, 1024, H100, 1)
    given = estimated(cfg, {}, 1024, H100)
    assert given is not None and found.tokens > 1270 > given.tokens


SIZED = {name: ranks for name in options("experiment") if (ranks := ranks_of_experiment(name))}
QUICK = [
    ("gpt_oss_20b_8gpu", 4, "h200"),
    ("moonlight_8gpu", 8, "h100"),
    ("mixtral_8x7b_8gpu", 16, "h100"),
    ("qwen3_next_16gpu", 16, "h200"),
]
"""Experiments, ranks and machines whose searches take seconds."""
EVERY = product(SIZED, (0.5, 1, 2), ("h100", "h200"))
SLOW = [(name, int(by * SIZED[name]), machine) for name, by, machine in EVERY]
SLOW.append(("qwen3_235b_64gpu", 256, "h100"))


@pytest.mark.parametrize(
    ("name", "world", "machine"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW if each not in QUICK)],
)
def test_no_next_override_is_faster_than_the_best_found(
    name: str, world: int, machine: str
) -> None:
    """Neither from the experiment, nor from one of the layouts that are found."""
    cfg, rates = load([f"experiment={name}", f"run.machine={machine}"]), MACHINES[machine]
    found = best(cfg, world, rates, 5)
    most = 1.005 * found[0].tokens if found else 0.0
    for start in (cfg, *(changed(cfg, one.changes) for one in found)):
        beyond = next_override(start, world, rates, None)
        assert beyond is None or beyond.tokens <= most, beyond
    if found:
        first = changed(cfg, found[0].changes)
        assert next_override(first, world, rates, found[0].seconds) is None


@pytest.mark.slow
def test_no_layout_of_a_small_search_is_faster() -> None:
    """Against layouts and memory sets of eight ranks, each estimated by itself."""
    cfg = load([*QWEN, "model.layers=12", "data.global_batch=64"])
    (found,) = best(cfg, 8, H100, 1)
    every = (
        estimated(cfg, layout.changes() | chosen.changes, 8, H100)
        for layout in layouts(cfg, 8, 8)
        for chosen in sets_of(cfg, H100)
        if layout.micro_batch == layout.context == 1 and layout.tensor <= 2
    )
    least = min(one.seconds for one in every if one is not None)
    assert found.seconds < 1.01 * least


def test_forced_choices_stay() -> None:
    found, _, _ = searched(*QWEN, "parallel.dispatch=alltoall", world=8)
    assert found and all("parallel.dispatch=alltoall" in command for _, command in found)


def test_overlap_of_micro_batches_is_searched() -> None:
    """Between nodes, also with stages and tensor parallelism."""
    overlapping = [layout for layout in layouts(load(QWEN), 32, 8) if layout.overlap == "on"]
    assert overlapping and {layout.context for layout in overlapping} == {1}
    assert {layout.pipeline for layout in overlapping} == {1, 2}
    assert {layout.tensor for layout in overlapping} > {1, 2}
    assert all(layout.expert > 8 for layout in overlapping)
    changes = overlapping[0].changes()
    assert changes["parallel.overlap_microbatches"] == "on"


def test_what_fits_nowhere_exits_2_and_says_what_would() -> None:
    """Every line of advice is of knobs that are not set, with a search that finds something."""
    base = ["experiment=qwen3_next_16gpu", "parallel.expert=4"]

    def advice(*words: str) -> dict[str, str]:
        found, text, code = searched(*base, *words, world=8)
        assert not found and code == 2 and "\nnothing fits\n" in text
        return dict(re.findall(r"^  with (.*?): (\S+)", text, re.M))

    told = advice()
    assert list(told) == ["parallel.world_size=16", "optim.moments=bf16"]
    for words, rate in told.items():
        cfg = load([*base, words])
        (again,) = best(cfg, cfg.parallel.world_size or 8, MACHINES["h200"], 1)
        assert f"{again.tokens:,.0f}" == rate
    told = advice("run.machine=h100", "optim.moments=bf16")
    assert list(told) == ["parallel.world_size=16"]  # moments in bf16 are set
    alone = [*LARGE, "run.machine=h100", "optim.moments=bf16", "parallel.pipeline=1"]
    _, text, _ = searched(*alone, "parallel.expert=1", world=1)
    assert re.findall(r"^  with (.*?): ", text, re.M) == ["parallel.world_size=128"]
    alone.append("parallel.dispatch=local")
    _, text, _ = searched(*alone, "parallel.expert=1", world=1)
    assert text.endswith("nothing fits, and neither more ranks nor smaller states help\n")


def test_an_experiment_is_searched_on_ranks_that_its_own_layout_does_not_divide(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["experiment=qwen3_next_16gpu", "parallel.pipeline=3", "parallel.world_size=8"]
    words.append("optim.moments=bf16")
    assert train.main([*words, "run.dry_run=search"]) == 0
    text = capsys.readouterr().out
    assert "  as given  not on 8 ranks: parallel.pipeline=3 does not divide 8 ranks / " in text
    assert re.search(r"^torchrun --standalone --nproc-per-node 8 .*parallel.pipeline=", text, re.M)
    with pytest.raises(SystemExit):  # what no layout mends is refused as before
        train.main([*words, "run.dry_run=search", "optim.lr=-1"])
    assert "optim.lr=-1" in capsys.readouterr().err
    assert train.main([*words[:1], "parallel.world_size=7", "run.dry_run=search"]) == 2
    told = "no layout in powers of two divides 7 ranks and data.global_batch=512; set "
    assert f"{told}parallel.world_size=4 or parallel.world_size=8" in capsys.readouterr().err


def test_what_is_as_fast_is_one_line_of_the_least_memory() -> None:
    def of(seconds: float, size: int) -> Found:
        return Found({}, seconds, 1 / seconds, natural=1 / seconds, size=size, host=0, busy=0)

    fast, lean, slower = of(1.0, 70), of(1.0006, 64), of(1.006, 50)
    assert told_apart([slower, fast, lean], lambda one: one) == [lean, slower]


def test_what_is_proposed_fits_with_the_error_of_estimates_to_spare() -> None:
    cfg = load(QWEN)
    (found,) = best(cfg, 8, H100, 1)
    assert 1.02 * found.size <= H100.room == int((79.1 - 4) * 2**30)
    short = replace(H100, memory_gib=found.size * 1.0199 / 2**30 + 4)
    assert estimated(cfg, found.changes, 8, short) is None
    enough = replace(H100, memory_gib=found.size * 1.0201 / 2**30 + 4)
    assert estimated(cfg, found.changes, 8, enough) is not None
    with_little = changed(cfg, found.changes)
    near = next_override(with_little, 8, short, None)
    assert near is not None and near.size <= short.safe_room < found.size


def test_a_layout_that_keeps_the_network_busy_says_so() -> None:
    words = ["experiment=gpt_oss_120b_64gpu", "parallel.pipeline=1", "parallel.expert=64"]
    words += ["parallel.virtual_pipeline=1", "run.machine=h100"]
    cfg, (found, text, _) = load(words), searched(*words, world=64)
    sent = re.search(r"forward, .*?\((.*?) over", section(EXPERTS, *words, world=64))
    there = re.search(r"per token .*?\((.*?) over", section(EXPERTS, *words, world=64))
    assert sent is not None and there is not None
    tokens, counts = 1280 * 4096 / 64, parameters(cfg.model)
    bytes_ = 36 * tokens * 1e3 * (float(sent[1]) + float(there[1]))
    bytes_ += (4 + 2) * (counts.total - counts.routed_experts) * 63 / 64  # gradients, parameters
    given = estimated(cfg, {}, 64, H100)
    assert given is not None and given.busy == pytest.approx(
        bytes_ / 40e9 / given.seconds, rel=0.01
    )
    busy = f"network busy for {given.busy:.0%} of the step"
    assert 0.6 < given.busy < 0.75 and re.search(rf"as given  .*, {busy}$", text, re.M)
    said = ["network busy" in line for line in re.findall(r"^\d\. .*$", text, re.M)]
    assert said == [one.busy > 0.6 for one in best(cfg, 64, H100, 5)]
    assert len(found) == 5 and {*said} == {True, False}
    assert f"\n  {busy}: " in section(STEP, *words, world=64)


def test_no_step_is_shorter_than_its_network_is_busy() -> None:
    """Each rank's share of a small batch leaves no time beside which gradients could be sent."""
    words = ["experiment=moonlight_8gpu", "run.machine=h100", "data.global_batch=512"]
    words += ["parallel.tensor=8", "parallel.expert=64", "data.micro_batch=1"]
    given = estimated(load(words), {}, 4096, H100)
    assert given is not None and given.busy == pytest.approx(1.0)
    assert "network busy for 100% of the step" in section(STEP, *words, world=4096)
    best = re.search(r"at best ([0-9.]+) s: .*: network alone", section(STEP, *words, world=4096))
    # At line rate, with the fewest bytes of tokens that any transport sends.
    assert best is not None and 0.7 < float(best[1]) / given.seconds <= 40 / 50


@pytest.mark.slow
def test_precision_is_searched_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=moonlight_8gpu", "parallel.world_size=8"]
    assert train.main([*words, "run.dry_run=search_precision"]) == 0
    assert "TFLOP/s/GPU in fp8_block" in capsys.readouterr().out
    assert train.main([*words, "run.dry_run=search"]) == 0
    assert "fp8" not in capsys.readouterr().out


def test_other_values_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main(["run.dry_run=serach"])
    assert capsys.readouterr().err == (
        "error: run.dry_run=serach is not one of search, search_precision, true or false; "
        "set run.dry_run=search\n"
    )


def test_the_next_override_is_faster_and_fits() -> None:
    given = PUBLISHED_V3
    cfg = load(given)
    known = resolved(cfg, 1024, 8)
    seconds = step_time(known, 1024, H100).total
    found = next_override(cfg, 1024, H100, seconds)
    assert found is not None and found.seconds < seconds
    assert next_override(cfg, 1024, H100, found.seconds / 2) is None
    text = section("In short", *given, world=1024)
    (line,) = re.findall(r"^  next      (.*): [\d,]+ tokens/s/GPU in ", text, re.M)
    again = load([*given, *shlex.split(line)])
    validate(again, 1024)
    fit = resolved(again, 1024, 8)
    assert needed(fit, 1024) <= H100.safe_room and host_needed(fit, 1024) <= H100.host_room
    assert step_time(fit, 1024, H100).total == pytest.approx(found.seconds)
