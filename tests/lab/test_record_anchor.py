"""`scripts/lab/record_anchor.py`: a throughput record of a run's metrics."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from phalanx.configs.arithmetic.accounting import flops_per_token
from phalanx.configs.load import load
from phalanx.configs.records import own
from phalanx.scripts.lab import record_anchor

COMMAND = "torchrun --nproc-per-node 2 train.py model=tiny run=bench run.device=cpu kernels=torch"


def metrics(path: Path, *, model: str = "tiny", steps: int = 50, **change: Any) -> Path:
    """A metrics.jsonl as a run of COMMAND on two GPUs would write it, with a wavering clock."""
    cfg = load([f"model={model}"])
    tokens = cfg.data.global_batch * cfg.data.sequence_length / 2
    lines = [{"event": "saved", "at": 0}]
    for step in range(1, steps + 1):
        seconds = 0.5 + 0.01 * (step % 3) + (20 if step == 1 else 0)
        rate = tokens / seconds
        lines.append(
            {
                "step": step,
                "loss": 6 - step / 10,
                "step_time": seconds,
                "tokens_per_second_per_gpu": rate,
                "tflops_per_gpu": rate * flops_per_token(cfg.model, 256) / 1e12,
                "load_max": 1.25,
                "dead_experts": 3,
                "reruns": 2,
                "capacity_factor": 1.75,
                "memory": 70 + min(step, 45) / 10,
                "memory_total": 139.8,
                "time": 1795203815.0,
            }
        )
    lines = [{k: v for k, v in (line | change).items() if v is not None} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def record(tmp_path: Path, metrics_file: Path, *more: str, **change: str) -> int:
    options = {"name": "own_tiny", "hardware": "2 x H200", "command": COMMAND, "commit": "abc123+"}
    flags = [f"--{name}={value}" for name, value in (options | change).items()]
    return record_anchor.main([f"--metrics={metrics_file}", f"--folder={tmp_path}", *flags, *more])


def test_recorded_numbers_are_those_of_steps_41_to_50(tmp_path: Path) -> None:
    source = metrics(tmp_path / "metrics.jsonl")
    assert record(tmp_path, source, "--version=torch=2.11.0+cu130", "--note=First.") == 0
    made = own(tmp_path)["own_tiny"]
    times = [0.5 + 0.01 * (step % 3) for step in range(41, 51)]
    rates = [32 * 256 / 2 / t for t in times]
    assert made.step_time == pytest.approx(statistics.fmean(times), rel=1e-5)
    assert made.step_time_sd == pytest.approx(statistics.stdev(times), rel=1e-2)
    assert made.tokens_per_second_per_gpu == pytest.approx(statistics.fmean(rates), rel=1e-5)
    assert made.tokens_per_second_per_gpu_sd == pytest.approx(statistics.stdev(rates), rel=1e-2)
    assert (made.loss_at_50, made.load_max_at_50, made.dead_experts_at_50) == (1.0, 1.25, 3)
    assert made.capacity_factor == 1.75 and made.rank_load_at_50 is None
    assert (made.reruns, made.peak_memory_gib, made.gpus) == (2, 74.5, 2)
    assert (made.model, made.system, made.routing) == ("tiny", "Phalanx, experts torch", "natural")
    assert (made.layout, made.data) == ("TP1 CP1 PP1 VP1 EP2 DP2", "real")
    assert made.versions == {"torch": "2.11.0+cu130"}
    assert (made.date, made.commit, made.command) == ("2026-11-20", "abc123+", COMMAND)
    assert made.note == "First."


def test_the_backend_that_auto_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, auto = metrics(tmp_path / "metrics.jsonl"), COMMAND.replace(" kernels=torch", "")
    assert record(tmp_path, source, command=auto) == 2
    assert "add kernels= to --command" in capsys.readouterr().err
    start = json.dumps({"event": "start", "experts": "fused"})
    source.write_text(f"{start}\n{source.read_text()}")
    assert record(tmp_path, source, command=auto) == 0
    assert own(tmp_path)["own_tiny"].system == "Phalanx, experts fused"


def test_a_record_is_replaced(tmp_path: Path) -> None:
    source = metrics(tmp_path / "metrics.jsonl")
    assert record(tmp_path, source) == record(tmp_path, source, "--note=Second.") == 0
    made = own(tmp_path)
    assert [made["own_tiny"].note] == ["Second."] and len(made) == 1
    assert made["own_tiny"].versions["megatron-core"] == "0.19.2"


def test_command_names_what_differs_from_the_model(tmp_path: Path) -> None:
    source = metrics(tmp_path / "metrics.jsonl")
    changed = f"{COMMAND} model.mtp_layers=0 model.moe.router.force_balance=true data=synthetic"
    assert record(tmp_path, source, command=changed) == 0
    made = own(tmp_path)["own_tiny"]
    assert made.overrides == ["model.mtp_layers=0"]  # routing has a field of its own
    assert (made.routing, made.data) == ("forced", "mock")
    replayed = f"{COMMAND} model.moe.router.replay=a"
    source = metrics(tmp_path / "metrics.jsonl", rank_load=1.07251)
    assert record(tmp_path, source, command=replayed) == 0
    made = own(tmp_path)["own_tiny"]
    assert (made.routing, made.overrides, made.rank_load_at_50) == ("replayed", [], 1.073)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({}, {"name": "tiny"}, "--name tiny: letters, digits and _ after own_"),
        ({}, {"hardware": "8 x H200"}, 'must be "2 x <GPU>"'),
        ({}, {"command": "torchrun --nproc-per-node 2 train.py model=tny"}, "did you mean"),
        ({}, {"command": f"{COMMAND} parallel.expert=3"}, "set parallel.expert=2"),
        ({}, {"command": f"{COMMAND} run.steps=100"}, "use run=bench"),
        ({}, {"command": f"{COMMAND} data.global_batch=64"}, "metrics are of another run"),
        ({"model": "tiny_deepseek"}, {}, "metrics are of another run"),
        ({"steps": 47}, {}, "lacks steps 48, 49, 50"),
        ({"memory_total": None}, {}, "without a GPU"),
        ({"loss": math.nan}, {}, "has no number for loss at step 41"),
        ({"tokens_per_second_per_gpu": math.inf}, {}, "has no number for tokens_per_second"),
    ],
)
def test_what_does_not_fit_is_not_recorded(
    change: dict[str, Any],
    options: dict[str, str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert record(tmp_path, metrics(tmp_path / "metrics.jsonl", **change), **options) == 2
    assert message in capsys.readouterr().err
    assert own(tmp_path) == {}


def test_metrics_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(tmp_path, tmp_path / "none.jsonl") == 2
    assert "none.jsonl" in capsys.readouterr().err
