"""Experiments against their records, and what the dry run names of what is off by default."""

import re

import pytest

from phalanx.configs.knobs import get, knobs
from phalanx.configs.load import load, options
from phalanx.configs.records import launch, own
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import validate
from phalanx.extras.planner.advice import needed, opt_ins
from phalanx.extras.planner.dry_run import dry_run
from phalanx.moe.plan.described import resolved
from phalanx.moe.text import storage
from tests.extras.planner.pages import OPT_INS, section

RECORDS = {name: launch(r.command) for name, r in own().items() if "fused" in r.system}
FULL = {
    "mixtral_8x7b_8gpu": {"parallel.capacity_factor", "data.micro_batch"},
    "qwen3_30b_128k_8gpu": {"data.micro_batch"},
}
"""Larger values for which an experiment leaves no memory."""
NAMED = {"optim.moments", "parallel.grad_dtype", "parallel.capacity_factor", "data.micro_batch"}
"""Knobs that cost accuracy or memory."""
OF_THE_HOST = {"parallel.expert", "data.global_batch", "model.moe.experts"}
OF_THE_HOST |= {"model.moe.router.groups", "model.moe.router.group_topk"}
"""Fewer GPUs have fewer experts and sequences."""
CHOSEN = OF_THE_HOST | {"precision"}
OF_FREE_MEMORY = {"precision.weights", "run.recompute"}
"""`auto` keeps FP8 copies where they fit; on fewer GPUs than it is for an experiment recomputes."""
OF_THE_BENCHMARK = {"model.moe.router.force_balance", "run.profile"}


@pytest.mark.parametrize("name", RECORDS)
def test_an_experiment_is_what_its_record_ran_but_for_what_costs(name: str) -> None:
    """All that `auto` takes is what the command of the record forced."""
    world, overrides = RECORDS[name]
    experiment = [text for text in overrides if text.startswith(("experiment=", "run="))]
    layout = [text for text in overrides if text.split("=")[0] in CHOSEN]
    ran = resolved(load(overrides), world, 8)
    ours = resolved(load([*experiment, *layout]), world, 8)
    differ = {path for path in knobs() if get(ran, path) != get(ours, path)}
    assert differ <= NAMED | OF_FREE_MEMORY | OF_THE_BENCHMARK
    assert (ours.kernels.backend, ours.parallel.dispatch) == ("fused", "symm")
    assert (ours.run.graph, ours.parallel.comm_sms) == ("full_iteration", 16)


@pytest.mark.parametrize("name", RECORDS)
def test_the_page_names_what_the_record_ran_on_top(name: str) -> None:
    world, overrides = RECORDS[name]
    (experiment,) = [text for text in overrides if text.startswith("experiment=")]
    layout = [text for text in overrides if text.split("=")[0] in CHOSEN]
    cfg = load([experiment, "run=bench", *layout])
    room = int((MACHINES["h200"].memory_gib - 4) * 2**30)
    reported = {text.split("=")[0] for text, *_ in opt_ins(cfg, world, MACHINES["h200"], 2 * room)}
    given = {text.split("=")[0]: text.split("=")[1] for text in overrides if "=" in text}
    extra = {path for path in NAMED & set(given) if given[path] != str(get(cfg, path))}
    assert extra and extra <= reported


@pytest.mark.parametrize("name", [n for n in options("experiment") if n.endswith("_8gpu")])
def test_memory_is_that_of_the_run_with_the_override(name: str) -> None:
    base = [f"experiment={name}"]
    text = section(OPT_INS, *base, world=8)
    reported = re.findall(r"^  (\S+=\S+): (\S+ .iB) (more|less); ", text, re.M)
    expected = NAMED - FULL.get(name, set())
    assert {override.split("=")[0] for override, *_ in reported} == expected
    before = needed(resolved(load(base), 8, 8), 8)
    for override, size, sign in reported:
        cfg = load([*base, override])
        validate(cfg, 8)
        more = needed(resolved(cfg, 8, 8), 8) - before
        assert (more > 0) == (sign == "more") and storage(abs(more)) == size


def test_what_is_set_already_or_does_not_fit_is_not_named() -> None:
    base = ["experiment=gpt_oss_20b_8gpu", "optim.moments=bf16", "parallel.capacity_factor=3"]
    text, _ = dry_run(load([*base, "parallel.grad_dtype=bf16", "data.micro_batch=8"]), 8)
    assert "Off by default" not in text  # sixteen sequences do not fit
