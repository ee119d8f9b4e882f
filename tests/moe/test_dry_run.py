"""The page of `run.dry_run`: every experiment, what it says, its exit code."""

import re

import pytest

import train
from configs.knobs import knobs, put
from configs.load import load, options
from configs.machines import MACHINES
from configs.records import launch, own
from configs.validate import ConfigError, validate
from moe.accounting import bf16_peak
from moe.dry_run import dry_run
from moe.estimate.advice import suggestions

WORLDS = {"deepseek_v3_1024gpu": 1024, "deepseek_v3_256gpu": 256, "gpt_oss_120b_64gpu": 64}


def page(*overrides: str, world: int) -> tuple[str, int]:
    cfg = load(list(overrides))
    validate(cfg, world)
    return dry_run(cfg, world)


@pytest.mark.parametrize("name", options("experiment"))
def test_every_experiment_fits_its_machines(name: str) -> None:
    text, code = page(f"experiment={name}", world=WORLDS.get(name, 8))
    assert code == 0, text
    for heading in ("Process groups", "Memory of a rank", "Experts of one layer", "Expected step"):
        assert heading in text
    rate = re.search(r"([\d,]+) tokens/s/GPU", text)
    assert rate and int(rate[1].replace(",", "")) > 50


def test_command_line_prints_the_page_without_a_run(
    capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    argv = ["experiment=deepseek_v3_1024gpu", "run.dry_run=true", "parallel.world_size=1024"]
    assert train.main([*argv, f"run.dir={tmp_path}/runs"]) == 0
    out = capsys.readouterr().out
    assert "ranks     1024 x H200" in out and "260.0 GFLOP a token" in out
    assert re.search(r"^  expert +64  0, 1, 2, 3, 4, 5, 6, 7, \.\.\.$", out, re.M)
    assert re.search(r"^  pipeline +8  0, 128, 256, ", out, re.M)
    assert not (tmp_path / "runs").exists()  # type: ignore[operator]


def test_what_does_not_fit_exits_2_and_says_what_helps() -> None:
    overrides = ("experiment=qwen3_30b_8gpu", "run.machine=h100")
    text, code = page(*overrides, world=8)
    assert code == 2 and "does not fit" in text
    (helps,) = re.findall(r"^  (run.recompute=full): .*, fits$", text, re.M)
    assert page(*overrides, helps, world=8)[1] == 0


def test_rows_of_the_budget_and_of_the_worst_case_are_told() -> None:
    text, _ = page("experiment=gpt_oss_20b_8gpu", world=8)
    told = re.findall(
        r"^  rows +(\d+) \((.*)\): (.*) of activations kept a layer, (.*) in all; "
        r"dispatch buffers (.*)$",
        text,
        re.M,
    )
    assert told == [
        ("24576", "capacity_factor 1.5", "270.2 MiB", "6.5 GiB", "724.0 MiB"),
        ("131072", "all tokens to one rank", "1.4 GiB", "35.7 GiB", "724.0 MiB"),
    ]
    alone, _ = page("model=tiny", world=1)  # has rows for every case
    assert len(re.findall(r"^  rows ", alone, re.M)) == 1


def test_suggested_overrides_are_overrides_and_do_what_they_say() -> None:
    overrides = ["experiment=qwen3_30b_8gpu", "run.machine=h100", "data.micro_batch=4"]
    cfg, machine = load(overrides), MACHINES["h100"]
    found = suggestions(cfg, 8, machine)
    assert len(found) >= 3 and [size for _, size in found] == sorted(size for _, size in found)
    for text, size in found:
        changes = dict(word.split("=", 1) for word in text.split())
        assert set(changes) <= set(knobs())
        world = int(changes.get("parallel.world_size", 8))
        again = load([*overrides, *text.split()])
        validate(again, world)
        from moe.estimate.advice import needed
        from moe.estimate.resolve import resolved

        assert needed(resolved(again, world, machine.node_gpus), world) == size


def test_experts_over_several_nodes_go_by_node() -> None:
    base = ("experiment=deepseek_v3_1024gpu",)
    text, _ = page(*base, world=1024)
    assert re.search(r"sent +hier: .* 7.00 of them to other nodes", text)
    assert "receive buffers of hier" in text
    steps = [
        float(re.findall(r"^  step ([\d.]+) s", page(*base, dispatch, world=1024)[0], re.M)[0])
        for dispatch in ("parallel.dispatch=auto", "parallel.dispatch=alltoall")
    ]
    assert steps[0] < 0.5 * steps[1]


@pytest.mark.parametrize("overrides", ["parallel.expert=8", "parallel.expert=4"])
def test_one_node_is_too_few_to_go_by_node(overrides: str) -> None:
    with pytest.raises(ConfigError, match="whole nodes of 8 GPUs.*parallel.dispatch=auto"):
        page("experiment=qwen3_30b_8gpu", "parallel.dispatch=hier", overrides, world=8)


def test_a_kernel_that_no_such_gpu_runs_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["model=tiny", "kernels=fused", "model.moe.ffn=72", "run.dry_run=true"]
    assert train.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: kernels.backend=fused cannot run here") and "64" in err


@pytest.mark.parametrize("name", WORLDS)
def test_groups_are_those_of_megatron(name: str) -> None:
    from megatron.core.parallel_state import RankGenerator

    world, cfg = WORLDS[name], load([f"experiment={name}"])
    text, _ = page(f"experiment={name}", world=world)
    p = cfg.parallel
    data = world // (p.tensor * p.pipeline)
    order = "tp-cp-ep-dp-pp"  # of parallel_state.initialize_model_parallel
    dense = RankGenerator(tp=p.tensor, ep=1, dp=data, pp=p.pipeline, cp=1, order=order)
    copies = world // (p.pipeline * p.expert)
    sparse = RankGenerator(tp=1, ep=p.expert, dp=copies, pp=p.pipeline, cp=1, order=order)
    expected = {
        "tensor": dense.get_ranks("tp")[0],
        "data": dense.get_ranks("dp")[0],
        "pipeline": dense.get_ranks("pp")[0],
        "expert": sparse.get_ranks("ep")[0],
        "expert-data": sparse.get_ranks("dp")[0],
    }
    for group, ranks in expected.items():
        row = re.search(rf"^  {group} +(\d+)  (.*)$", text, re.M)
        assert row and int(row[1]) == len(ranks)
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        assert row[2] == shown


def test_parts_of_the_work_add_up() -> None:
    from moe.accounting import flops_per_token
    from moe.estimate.timing import _flops

    for name in options("model"):
        cfg = load([f"model={name}", "data.sequence_length=4096"])
        f, m, e = _flops(cfg), cfg.model, cfg.model.moe
        layers = m.layers + m.mtp_layers
        sum_ = layers * (f.projections + f.core) + e.dense_layers * f.mlp + f.head
        sum_ += (layers - e.dense_layers) * (f.routed + f.shared) + m.mtp_layers * f.joining
        assert sum_ == pytest.approx(flops_per_token(m, 4096)) and min(f.projections, f.core) > 0


def test_machines_are_slower_than_their_data_sheets() -> None:
    for machine in MACHINES.values():
        peak = bf16_peak(machine.name) or 0
        assert max(machine.dense_tflops, machine.expert_tflops, machine.attention_tflops) < peak
        assert machine.network_gbs < machine.node_gbs < machine.memory_gbs


BALANCED = {name: r for name, r in own().items() if name.endswith("_balanced")}


@pytest.mark.parametrize("name", BALANCED)
def test_steps_take_a_little_more_than_expected(name: str) -> None:
    from moe.estimate.resolve import resolved
    from moe.estimate.timing import step_time

    record = BALANCED[name]
    world, overrides = launch(record.command)
    expected = step_time(resolved(load(overrides), world, 8), world, MACHINES["h200"]).total
    assert record.routing == "forced"
    assert 0.9 * record.step_time < expected < record.step_time


def test_more_load_never_takes_less_time() -> None:
    from moe.estimate.resolve import resolved
    from moe.estimate.timing import step_time

    cfg, machine = load(["experiment=moonlight_8gpu"]), MACHINES["h200"]
    base = step_time(resolved(cfg, 8, 8), 8, machine).total
    for path, value in (("run.recompute", "full"), ("parallel.dispatch", "alltoall")):
        changed = load(["experiment=moonlight_8gpu"])
        put(changed, path, value)
        assert step_time(resolved(changed, 8, 8), 8, machine).total > base
