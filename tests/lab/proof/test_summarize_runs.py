"""`scripts/lab/proof/summarize_runs.py` on written runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.scripts.lab.proof import summarize_runs

COMMAND = (
    "# 2026-01-02  python train.py experiment=proof_moe 'data.blend=[/data/train]' data.split=1 "
    "optim.lr=1e-3 run.dir=/runs run.name=one\n"
)


def step(number: int, **more: Any) -> dict[str, Any]:
    return {
        "step": number,
        "tokens": 100 * number,
        "loss": 4.0 - number / 10,
        "tokens_per_second_per_gpu": 1000.0 + number,
        "tflops_per_gpu": 2.0,
        "mfu": 0.25,
        "memory": 3.25 if number == 2 else 2.5,
        "load_max": 1.5,
        "dead_experts": int(number < 3),
        "goodput": 0.5,
        "seconds": {"training": 2.0 * number, "start": 3.0},
        **more,
    }


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(COMMAND + "model: {name: tiny}\n")


def test_numbers_of_a_run_are_those_of_its_records(tmp_path: Path) -> None:
    bits = {"valid_bits_per_byte": 1.23456, "valid_bits_per_byte/c": 1.0}
    rows = [step(number, **(bits if number == 4 else {})) for number in range(1, 5)]
    start = {"event": "start", "at": 0, "experts": "fused", "ranks": 2}
    end = {"event": "summary", "at": 4, "goodput": 0.75, "seconds": {"training": 8.04, "end": 1}}
    write(tmp_path / "one", [start, *rows, end])
    out = tmp_path / "out.json"
    assert summarize_runs.main([str(tmp_path / "one"), "--json", str(out)]) == 0
    assert json.loads(out.read_text()) == {
        "runs": {
            "one": {
                "overrides": "experiment=proof_moe optim.lr=1e-3",
                "experts": "fused",
                "ranks": 2,
                "steps": 4,
                "tokens": 400,
                "tokens_per_second_per_gpu": 1002,
                "mfu": 0.25,
                "memory_gib": 3.2,
                "goodput": 0.75,
                "seconds": {"training": 8.0, "end": 1},
                "train_loss": 3.75,
                "load": {"busiest_over_mean": 1.5, "last_step_with_idle_expert": 2},
                "columns_of_evaluations": ["tokens", "seconds", "all", "c"],
                "evaluations": [[400, 8.0, 1.2346, 1.0]],
            }
        }
    }


def test_a_run_on_a_cpu_has_no_mfu(tmp_path: Path) -> None:
    row = step(1, valid_bits_per_byte=1.5)
    del row["mfu"]
    write(tmp_path / "one", [{"event": "start", "at": 0, "ranks": 1}, row])
    found = summarize_runs.summary(tmp_path / "one")
    assert "mfu" not in found and found["tokens_per_second_per_gpu"] == 1001


def test_a_run_without_steps_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "one", [{"event": "start", "at": 0}])
    assert summarize_runs.main([str(tmp_path / "one"), "--json", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"summarize_runs: {tmp_path}/one/metrics.jsonl has no step"
    ]
