"""Choices that all ranks of a job make alike: whether steps are captured, which experts wait."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.tables.machines import MACHINES
from phalanx.configs.validate import ConfigError
from phalanx.kernels.registry import Choice
from phalanx.moe.estimate.free_memory import FreeMemory
from phalanx.moe.estimate.memory import needed, with_delayed, with_fp8_weights
from phalanx.moe.estimate.resolve import resolved
from phalanx.moe.training import choices
from phalanx.moe.training.choices import (
    agreed_experts,
    choose_delayed_wgrad,
    choose_fp8_weights,
    choose_graph,
    choose_kernels,
    choose_overlap,
    with_choices,
)
from phalanx.parallel.fault.agreement import gather
from phalanx.parallel.runtime import Runtime
from tests.support.distributed import run_distributed
from tests.support.pages import README, blocks
from tests.support.runs import SMALL, run

KERNELS = [Choice("grouped_mlp", "fused", ""), Choice("attention", "te", "")]
KERNELS.append(Choice("norm", "te", ""))


def on(
    device: str,
    overrides: list[str],
    kernels: list[Choice],
    dispatch: str,
    gpu: str = "NVIDIA H200",
) -> Config:
    """Config with choices on a rank whose device has the CUDA name `gpu`."""
    here = Runtime(0, 1, 0, torch.device(device))
    with mock.patch.object(torch.cuda, "get_device_name", return_value=gpu):
        return with_choices(load(overrides), here, kernels, dispatch)


def _line(overrides: list[str], experts: list[str], device: str, dispatch: str) -> str:
    """`backend; reason` of the start page, or the error; each rank has its own experts."""
    kernels = [replace(KERNELS[0], backend=experts[dist.get_rank()]), *KERNELS[1:]]
    try:
        choice = choose_graph(on(device, overrides, kernels, dispatch))
    except ConfigError as error:
        return str(error)
    assert choice.op == "graph"
    return f"{choice.backend}; {choice.reason}"


def lines(
    *overrides: str,
    experts: tuple[str, ...] = ("fused", "fused"),
    device: str = "cuda",
    dispatch: str = "symm",
) -> set[str]:
    """Choices of all ranks."""
    ranks = len(experts)
    return set(run_distributed(_line, ranks, list(overrides), list(experts), device, dispatch))


CAPTURED = "captured after 2 eager steps, which takes seconds"


@pytest.mark.dist
def test_auto_is_captured_where_it_can_be() -> None:
    assert lines() == {f"full_iteration; auto; {CAPTURED}"}
    assert lines("run.graph=full_iteration") == {
        f"full_iteration; run.graph=full_iteration; {CAPTURED}"
    }
    assert lines("run.graph=off") == {"off; run.graph=off"}
    assert lines("run.graph=off", device="cpu") == {"off; run.graph=off"}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (dict(device="cpu"), "needs CUDA"),
        (dict(experts=("reference",) * 2), "reference experts count their rows on the host"),
        (dict(dispatch="deepep"), "parallel.dispatch=deepep counts rows on the host"),
        (
            dict(experts=("fused", "reference")),
            "reference experts count their rows on the host (rank 1)",
        ),
    ],
)
def test_what_one_rank_cannot_capture_none_does(given: dict[str, Any], reason: str) -> None:
    assert lines(**given) == {f"off; auto; not full_iteration: {reason}"}
    refused = f"run.graph=full_iteration cannot run: {reason}; set run.graph=auto"
    assert lines("run.graph=full_iteration", **given) == {refused}


def _experts(names: list[str]) -> str:
    return agreed_experts(names[dist.get_rank()])


@pytest.mark.dist
def test_no_experts_wait_for_tokens_if_those_of_one_rank_cannot() -> None:
    for names, told in (
        (["fused", "fused"], {"fused"}),
        (["fused", "torch"], {"torch"}),
        (["torch", "reference"], {"torch"}),
    ):
        assert set(run_distributed(_experts, 2, names)) == told


def test_the_configuration_that_rules_take_is_a_copy() -> None:
    cfg = load([])
    resolved = with_choices(cfg, Runtime(0, 1, 0, torch.device("cpu")), KERNELS, "local")
    assert (resolved.kernels.backend, resolved.parallel.dispatch) == ("fused", "local")
    assert (resolved.run.device, resolved.run.graph) == ("cpu", "auto")
    assert cfg == load([])


@pytest.mark.dist
def test_the_page_has_what_auto_came_to_and_the_folder_what_was_given(tmp_path: Path) -> None:
    given = [*SMALL, "data=synthetic", "run.steps=1", "run.save_interval=-1"]
    main = run(2, [*given, "model.attention.head_dim=8", f"run.dir={tmp_path}"])[0]
    assert main.code == 0, main.err
    shown = blocks("text", README)[0]
    start = shown.index("  op           backend")
    table = shown[start : shown.index("\n\n", start)]
    assert "not full_iteration: needs CUDA" in table and table in main.out
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["run"]["graph"] == saved["parallel"]["comm_sms"] == "auto"


FP8 = ["precision=fp8_block"]


def _lines(
    choose: Callable[[Config, Runtime], list[Choice]],
    transport: str,
    overrides: list[str],
    experts: str,
    device: str,
    free: list[int],
    gpus: tuple[str, str] = ("NVIDIA H200", "NVIDIA H200"),
) -> str:
    """`backend; reason` of the start page with so many bytes of a GPU free, of each rank."""
    kernels = [replace(KERNELS[0], backend=experts), *KERNELS[1:]]
    here = Runtime(dist.get_rank(), dist.get_world_size(), 0, torch.device(device))
    cfg = on(device, overrides, kernels, transport, gpus[here.rank])
    cfg.run.graph = "off"
    room = FreeMemory("GPU 0", free[dist.get_rank()])
    with mock.patch.object(choices, "free_gpu_memory", return_value=room):
        return "".join(f"{c.backend}; {c.reason}" for c in choose(cfg, here))


def _fp8_weights(cfg: Config, runtime: Runtime) -> list[Choice]:
    return choose_fp8_weights(cfg, runtime)[1]


_weights = partial(_lines, _fp8_weights, "symm")


@pytest.mark.dist
def test_fp8_copies_of_weights_are_where_they_fit_on_all_ranks() -> None:
    def told(*more: str, experts: str = "fused", free: tuple[int, ...] = (2**40, 2**40)) -> str:
        (line,) = set(run_distributed(_weights, 2, [*FP8, *more], experts, "cuda", list(free)))
        return line

    all_kept = r"resident; auto; with .* of 993\.3 GiB would be needed"
    assert re.fullmatch(all_kept, told("model.moe.router.force_balance=true"))
    assert re.fullmatch(f"{all_kept} at capacity_factor 3", told())
    assert told(free=(0, 0)).startswith("scratch; auto; with resident weights ")
    cfg = on("cuda", FP8, KERNELS, "symm")
    cfg.parallel.capacity_factor *= 2  # room for natural routing
    # A hundredth of a layer is missing; 3 % of free memory are not for tensors.
    most, least = (needed(with_fp8_weights(cfg, each), 2) for each in ("resident", "scratch"))
    short_of_one = int((most - (most - least) / cfg.model.layers / 100) / 0.97)
    of = cfg.model.layers
    assert told(free=(short_of_one, short_of_one)).startswith(
        f"resident in {of - 1} of {of} layers; auto"
    )
    short = run_distributed(_weights, 2, FP8, "fused", "cuda", [2**40, 0])
    assert [line.split(";")[0] for line in short] == ["scratch", "scratch"]
    assert [line.endswith("factor 3, and another rank has less free memory") for line in short] == [
        True,
        False,
    ]
    assert told("precision.weights=resident", free=(0, 0)) == "resident; precision.weights=resident"
    assert told(experts="megatron").startswith("resident; auto; Transformer Engine keeps its own")
    emulated = "torch experts multiply values of FP8 in bf16"
    assert told(experts="torch") == f"none; auto; {emulated}"
    forced = told("precision.weights=scratch", experts="torch")
    assert forced == f"none; {emulated}; precision.weights=scratch is not in effect"
    assert run_distributed(_weights, 1, [], "fused", "cuda", [0]) == [""]


def _weights_of_two_backends() -> tuple[str, list[int]]:
    here = _weights(FP8, ["fused", "torch"][dist.get_rank()], "cuda", [0, 0])
    return here, gather(dist.get_rank())  # what ranks gather next


@pytest.mark.dist
def test_ranks_without_copies_of_their_own_choose_with_the_others() -> None:
    lines_, next_ = zip(*run_distributed(_weights_of_two_backends, 2), strict=True)
    assert [line.split(";")[0] for line in lines_] == ["scratch", "none"]
    assert list(next_) == [[0, 1], [0, 1]]


def _overlap(overrides: list[str], transports: tuple[str, str]) -> str:
    """Choice of overlap on this rank, whose group has a transport of its own, or the error."""
    cfg = on("cpu", ["model=tiny", "parallel.expert=2", *overrides], KERNELS, "auto")
    cfg.parallel.dispatch = transports[dist.get_rank()]
    try:
        overlaps, choices = choose_overlap(cfg, Runtime(dist.get_rank(), 2, 0, torch.device("cpu")))
    except ConfigError as error:
        return str(error)
    return f"{overlaps} " + "".join(f"{c.op} {c.backend} {c.reason}" for c in choices)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("value", "transports", "start"),
    [
        ("on", ("alltoall", "alltoall"), "True micro-batches overlap {knob}=on; hides "),
        ("on", ("alltoall", "deepep"), "{knob}=on cannot run: parallel.dispatch=deepep has one "),
        ("off", ("alltoall", "alltoall"), "False micro-batches in turn {knob}=off"),
        ("auto", ("alltoall", "symm"), "False "),
        ("auto", ("alltoall", "alltoall"), "False "),  # on a CPU
    ],
)
def test_all_ranks_overlap_micro_batches_or_none(
    value: str, transports: tuple[str, str], start: str
) -> None:
    knob = "parallel.overlap_microbatches"
    lines_ = run_distributed(_overlap, 2, [f"{knob}={value}"], transports)
    assert all(line.startswith(start.format(knob=knob)) for line in lines_), lines_


@pytest.mark.parametrize("here", [True, False])
def test_the_page_has_what_computes_experts_of_megatron_core(here: bool) -> None:
    def told(*overrides: str) -> str:
        cfg, machine = load(["kernels=megatron", *overrides]), Runtime(0, 1, 0, torch.device("cpu"))
        with mock.patch.object(choices, "HAVE_TE", here):
            return choose_kernels(cfg, machine)[0].reason

    by = "Transformer Engine's grouped GEMM" if here else "a loop over experts"
    assert told() == f"kernels.backend=megatron; {by}"
    assert told("model=tiny_dense") == "kernels.backend=megatron"


@pytest.mark.parametrize(
    ("device", "gpu", "name"),
    [
        ("cuda", "NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("cuda", "NVIDIA H200", "H200"),
        ("cuda", "NVIDIA GB300", "H100 SXM"),
        ("cpu", "NVIDIA H200", "H100 SXM"),
    ],
)
def test_estimates_of_a_run_are_for_the_gpu_that_it_has(device: str, gpu: str, name: str) -> None:
    cfg = on(device, ["run.machine=h100"], KERNELS, "local", gpu)
    assert MACHINES[cfg.run.machine].name == name


_delayed = partial(_lines, choose_delayed_wgrad, "local")


@pytest.mark.dist
def test_weight_gradients_wait_if_their_operands_fit_on_all_ranks() -> None:
    def told(
        *more: str, experts: str = "fused", device: str = "cuda", free: int = 2**40
    ) -> list[str]:
        given = ["parallel.pipeline=2", *more]
        return run_distributed(_delayed, 2, given, experts, device, [2**40, free])

    many = ["data.micro_batch=8", "model.moe.experts=4", "model.moe.top_k=2"]  # rows of an expert
    for line in told(*many, "data.sequence_length=1024", "data.global_batch=64"):
        assert re.fullmatch(r"on; auto; .*; with their operands .* of 1\.0 TiB would .*", line)
    first, second = told(free=0)
    assert first.startswith("off; auto; with their operands ")
    assert first.endswith(" would be needed, and another rank has less free memory")
    assert second.startswith("off; auto; ") and second.endswith(" of 0 bytes would be needed")
    assert set(told(device="cpu", free=0)) == {"on; auto; while a stage would wait for transfers"}
    assert set(told("parallel.delay_wgrad=on", free=0)) == {"on; parallel.delay_wgrad=on"}
    assert set(told("parallel.delay_wgrad=off")) == {"off; parallel.delay_wgrad=off"}
    (stock,) = set(told(experts="megatron"))
    assert stock == (
        "off; parallel.delay_wgrad=auto; kernels=megatron computes them in the backward pass"
    )
    assert set(told("parallel.pipeline=1")) == {""}


@pytest.mark.dist
def test_weight_gradients_wait_as_the_dry_run_for_the_gpu_of_the_run_says() -> None:
    """With 900 rows of an expert H100s read sums longer than they multiply, and H200s do not."""
    given = ["model=qwen3_30b_a3b", "model.layers=4", "parallel.expert=1", "parallel.pipeline=2"]
    given += ["data.sequence_length=3600", "data.micro_batch=4", "data.global_batch=32"]

    def told(*gpus: str, machine: str) -> set[str]:
        words = [*given, f"run.machine={machine}"]
        started = run_distributed(_delayed, 2, words, "fused", "cuda", [2**42] * 2, gpus)
        return {line.split(";")[0] for line in started}

    h100, h200, unknown = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GB300"
    for gpu, value in ((h100, "pairs"), (h200, "on")):
        machine = "h100" if gpu == h100 else "h200"
        estimated = resolved(load([*given, f"run.machine={machine}"]), 2, 8).parallel.delay_wgrad
        assert estimated == value
        assert told(gpu, gpu, machine="h200") == told(gpu, gpu, machine="h100") == {value}
    assert told(unknown, unknown, machine="h100") == {"pairs"}
    assert told(h100, h200, machine="h100") == {"on"}  # all ranks alike


@pytest.mark.dist
def test_weight_gradients_of_two_micro_batches_where_experts_have_few_rows() -> None:
    def told(
        *more: str, experts: str = "fused", transport: str = "local", free: int = 2**40
    ) -> str:
        choose = partial(_lines, choose_delayed_wgrad, transport)
        given = ["parallel.pipeline=2", *more]
        (line,) = set(run_distributed(choose, 2, given, experts, "cuda", [free] * 2))
        return line

    pairs, setting = "parallel.delay_wgrad=pairs", "pairs; parallel.delay_wgrad=pairs"
    assert re.fullmatch(r"pairs; auto; .*for two micro-batches at once; with their .*", told())
    need = {
        value: needed(with_delayed(_chosen("parallel.pipeline=2"), value), 2)
        for value in ("pairs", "on")
    }
    assert need["on"] < need["pairs"]
    assert told(free=need["pairs"]).startswith("pairs; auto; ")
    assert told(free=need["pairs"] - 1).startswith("on; auto; ")
    assert told(free=need["on"] - 1).startswith("off; auto; ")
    assert told(experts="torch").startswith("on; auto; ")
    assert told(pairs, free=0) == told(pairs, experts="torch") == setting
    assert told(pairs, "parallel.pipeline=1", "parallel.expert=1") == setting
    exchanging = [pairs, "parallel.pipeline=1", "parallel.expert=2"]
    assert told(*exchanging, transport="alltoall") == setting
    once = told(*exchanging, "data.micro_batch=4", "data.global_batch=8", transport="alltoall")
    beside = "overlap; exchanges of the backward pass"
    assert once == f"{beside}; {pairs}; a step has one micro-batch"
    for more, transport, why in (
        (["parallel.expert=1", "data.global_batch=8"], "local", "a step has one micro-batch"),
        ([], "symm", "parallel.dispatch=symm reuses its buffers of expert rows"),
    ):
        given = [pairs, "parallel.expert=2", "parallel.pipeline=1", "data.micro_batch=4", *more]
        assert told(*given, transport=transport) == f"off; {pairs}; {why}"


def _chosen(*overrides: str) -> Config:
    cfg = on("cuda", list(overrides), KERNELS, "local")
    cfg.run.graph = "off"
    return cfg
