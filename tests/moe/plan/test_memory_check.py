"""A run that cannot fit is refused before it is built, in a line with overrides that fit."""

import re
import time
from pathlib import Path

import psutil
import pytest

from phalanx.configs.load import load
from phalanx.configs.schema import Config
from phalanx.configs.validate import validate
from phalanx.moe.plan.cost.weights import stage_weights
from phalanx.moe.plan.facts import FreeMemory, free_host_memory
from phalanx.moe.plan.memory_check import (
    launch_refusal,
    memory_refusal,
    minimum_bytes,
    nearly_full,
    pinned_bytes,
)
from tests.support.advice import advised, tried
from tests.support.distributed import run_distributed
from tests.support.runs import run

GIB = 2**30
HOST = FreeMemory("this host", 20 * GIB)


def configured(*overrides: str, world: int = 1) -> Config:
    cfg = load(["run.device=cpu", *overrides])
    validate(cfg, world)
    return cfg


def refusal(*overrides: str, world: int = 1, memory: FreeMemory = HOST) -> str:
    return memory_refusal(configured(*overrides, world=world), world, range(world), memory) or ""


@pytest.mark.parametrize("model", ["tiny", "tiny_deepseek", "tiny_gpt_oss"])
@pytest.mark.parametrize("world", [1, 2])
def test_the_models_of_a_laptop_fit_in_half_a_gibibyte(model: str, world: int) -> None:
    assert refusal(f"model={model}", world=world, memory=FreeMemory("this host", GIB // 2)) == ""


@pytest.mark.parametrize("model", ["deepseek_v3", "gpt_oss_120b", "qwen3_30b_a3b"])
def test_a_large_model_is_refused_in_a_line_and_at_once(model: str) -> None:
    start = time.perf_counter()
    text = refusal(f"model={model}", world=2)
    assert time.perf_counter() - start < 3
    assert text.startswith(
        f"{model} does not fit: weights, gradients, optimizer and logits of 2 ranks take"
    )
    assert "has 20.0 GiB free" in text and "model.moe.experts=" in text and "\n" not in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=deepseek_v3"],
        ["model=qwen3_30b_a3b"],
        ["model=tiny", "model.vocab_size=1000000000"],
        ["model=qwen3_30b_a3b", "model.layers=2"],
        ["model=gpt_oss_20b", "model.layers=2", "parallel.grad_dtype=fp32"],
    ],
)
def test_the_overrides_that_it_names_fit(overrides: list[str]) -> None:
    text = refusal(*overrides)
    found = advised(text)
    assert found
    for helps in found:
        kept = overrides if not helps[0].startswith("model=") else []
        assert refusal(*kept, *helps) == "", helps
    (more,) = re.findall(r"more ranks with (.*)", text)
    (ranks,) = re.findall(r"parallel.world_size=(\d+)", more)
    assert tried(overrides, more.split()).parallel.world_size == int(ranks) > 1


def test_a_size_that_is_impossible_is_named() -> None:
    text = refusal("model=tiny", "model.vocab_size=1000000000")
    assert "most of it is model.vocab_size=1000000000" in text and "micro_batch" not in text


def test_only_what_surely_is_too_much_is_refused() -> None:
    """Swap counts, activations do not."""
    cfg = configured("model=tiny")
    need = minimum_bytes(cfg, 1, [0])
    assert memory_refusal(cfg, 1, [0], FreeMemory("", need)) is None
    assert memory_refusal(cfg, 1, [0], FreeMemory("", need - 1)) is not None
    assert memory_refusal(cfg, 1, [0], FreeMemory("", need - 10, swap=10)) is None


def test_logits_are_of_the_last_stage() -> None:
    base = ("model=tiny_gpt_oss", "parallel.pipeline=2")
    cfg = configured(*base, "model.vocab_size=4096", world=2)
    first, last = (minimum_bytes(cfg, 2, [rank]) for rank in (0, 1))
    weights = [
        w.parameter_bytes + w.gradient_bytes + w.optimizer_bytes for w in stage_weights(cfg, 2)
    ]
    logits = 2 * cfg.data.micro_batch * cfg.data.sequence_length * 4096
    assert (first, last) == (weights[0], weights[1] + logits)
    assert minimum_bytes(cfg, 2, [0, 1]) == first + last


def test_near_is_reported() -> None:
    memory = FreeMemory("GPU 0", 100 * GIB)
    assert nearly_full("it", 90 * GIB, memory, "stop") == ""
    assert nearly_full("it", 91 * GIB, memory, "stop").endswith("if it runs out of memory, stop")


def test_pinned_checkpoints_of_all_ranks_hold_the_model_once() -> None:
    """14 bytes a parameter: weights in bf16, masters and two moments in fp32, none twice."""
    cfg = configured("experiment=gpt_oss_20b_8gpu", "run.device=auto", world=8)
    everything = pinned_bytes(cfg, 8, range(8))
    assert everything == pytest.approx(14 * 20.9e9, rel=0.01)
    assert pinned_bytes(cfg, 8, range(4)) == pytest.approx(everything / 2, rel=0.01)


# --- what a host has ------------------------------------------------------------------------------


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_a_host_without_limits_has_what_is_available(tmp_path: Path) -> None:
    memory = free_host_memory(tmp_path, tmp_path / "none")
    assert memory.device == "this host"
    assert memory.free == pytest.approx(psutil.virtual_memory().available, rel=0.1)


@pytest.mark.parametrize("limited", ["job", "job/step"])
def test_the_tightest_cgroup_counts(tmp_path: Path, limited: str) -> None:
    write(tmp_path / "me", cgroup="0::/job/step")
    for name in ("job", "job/step"):
        most = "700000" if name == limited else "max"
        write(
            tmp_path / name,
            memory__max=most,
            memory__current="300000",
            memory__stat="anon 1\ninactive_file 50000",
        )
    memory = free_host_memory(tmp_path, tmp_path / "me" / "cgroup")
    assert (memory.device, memory.free) == ("this host's cgroup", 700000 - 300000 + 50000)


def test_cgroups_of_the_first_version(tmp_path: Path) -> None:
    write(tmp_path / "me", cgroup="9:cpu:/a\n4:memory:/job\n0::/")
    write(
        tmp_path / "memory" / "job",
        memory__limit_in_bytes="700000",
        memory__usage_in_bytes="600000",
        memory__stat="cache 2\ntotal_inactive_file 1",
    )
    assert free_host_memory(tmp_path, tmp_path / "me" / "cgroup").free == 100001


def test_ranks_of_a_launch_share_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert launch_refusal(configured("model=tiny", world=2), 2) is None
    assert "of 2 ranks take" in str(launch_refusal(configured("model=deepseek_v3", world=2), 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert "of a rank take" in str(launch_refusal(configured("model=deepseek_v3", world=2), 2))


# --- ranks ----------------------------------------------------------------------------------------


MIDDLE = (
    "run.device=cpu model=tiny kernels=reference model.hidden=256 model.layers=4 "
    "model.moe.ffn=512 model.moe.experts=32 model.vocab_size=16384 data.sequence_length=64 "
    "data.micro_batch=1 data.global_batch=2 run.steps=2 run.save_interval=-1 run.resume=never"
)
"""77 million parameters: more than what allocator and libraries keep on the side."""


def grown(folder: str) -> tuple[int, int]:
    """Exit code of a run, and bytes by which it raises the peak of this rank's memory."""
    from phalanx import train

    Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
    before = psutil.Process().memory_info().rss
    code = train.main([*MIDDLE.split(), f"run.dir={folder}"])
    status = Path("/proc/self/status").read_text()
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB", status, re.M)
    return code, 1024 * int(peak) - before


@pytest.mark.dist
def test_what_is_called_sure_is_really_taken(tmp_path: Path) -> None:
    """Or a run that fits might be refused; and it is most of what is taken."""
    sure = minimum_bytes(configured(*MIDDLE.split(), world=2), 2, [0])
    for code, size in run_distributed(grown, 2, str(tmp_path)):
        assert code == 0 and sure < size < 2 * sure


@pytest.mark.dist
def test_ranks_refuse_what_is_too_large_together_and_one_says_why(tmp_path: Path) -> None:
    overrides = ["run.device=cpu", "model=deepseek_v3", f"run.dir={tmp_path}"]
    main, other = run(2, overrides)
    assert main.code == other.code == 2 and other.out == other.err == ""
    assert all(line.startswith(("Phalanx: run ", "node ")) for line in main.out.splitlines())
    (line,) = main.err.splitlines()
    assert line.startswith("error: deepseek_v3 does not fit: ") and "set model=tiny" in line
    assert list(tmp_path.iterdir()) == []


def test_a_sequence_whose_logits_do_not_fit_is_named() -> None:
    given = ["model=tiny", "data.sequence_length=16000000", "data.micro_batch=4"]
    given += ["data.global_batch=4"]
    text = refusal(*given)
    size = "data.micro_batch=4 of data.sequence_length=16000000"
    assert f"most of it is logits of {size}: set data." in text
    for helps in advised(text):
        assert refusal(*given, *helps) == "", helps
