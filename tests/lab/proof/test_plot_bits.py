"""`scripts/lab/proof/plot_bits.py`: validations of runs in, tables, a file and a picture out."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.scripts.lab.proof import plot_bits

FLOPS = 1e9
"""FLOPs of a token."""


def run(folder: Path, bits: list[float], tokens_per_second: float) -> Path:
    """A run that validates every 1,000 tokens."""
    folder.mkdir()
    lines: list[dict[str, Any]] = [{"event": "start", "at": 0, "model": "tiny"}]
    for step, value in enumerate(bits, 1):
        spent = 1000 * step / tokens_per_second
        lines.append(
            {
                "step": step,
                "loss": 2.0,
                "tokens": 1000 * step,
                "tokens_per_second_per_gpu": tokens_per_second,
                "tflops_per_gpu": tokens_per_second * FLOPS / 1e12,
            }
        )
        lines.append(
            {
                "step": step,
                "tokens": 1000 * step,
                "valid_bits_per_byte": value,
                "valid_bits_per_byte/code": value - 0.5,
                "seconds": {"start": 9.0, "training": 0.75 * spent, "data": 0.25 * spent},
            }
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_tables_have_the_end_and_the_way_to_the_first_runs_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = run(tmp_path / "dense", [4.0, 3.0, 2.0], tokens_per_second=100)
    moe = run(tmp_path / "moe", [3.0, 1.0], tokens_per_second=50)
    worse = run(tmp_path / "worse", [5.0, 4.0], tokens_per_second=100)
    assert plot_bits.main([str(dense), str(moe / "metrics.jsonl"), str(worse)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["run", "tokens", "FLOPs", "seconds", "bits/byte", "code"],
        ["dense", "3.0", "k", "3.00e+12", "30.0", "2.0000", "1.5000"],
        ["moe", "2.0", "k", "2.00e+12", "40.0", "1.0000", "0.5000"],
        ["worse", "2.0", "k", "2.00e+12", "20.0", "4.0000", "3.5000"],
        [],
        ["until", "2.0000", "tokens", "FLOPs", "seconds", "faster"],
        ["dense", "3.0", "k", "3.00e+12", "30.0", "1.00x"],
        ["moe", "1.5", "k", "1.50e+12", "30.0", "1.00x"],
        ["worse", "-", "-", "-", "-"],
    ]


def test_seconds_by_the_median_leave_out_what_disturbed_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = run(tmp_path / "alone", [4.0, 3.0, 2.0], tokens_per_second=100)
    lines = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    times = iter([9.0, 9.5, 30.0])
    lines = [d | {"step_time": next(times)} if "tflops_per_gpu" in d else d for d in lines]
    (alone / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert plot_bits.main([str(alone), "--median"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[4] == "28.5"


def test_a_run_that_is_better_from_the_start_counts_from_its_first_validation(
    tmp_path: Path,
) -> None:
    points = plot_bits.points(run(tmp_path / "a", [2.0, 1.0], 100) / "metrics.jsonl")
    assert plot_bits.reached(points, 2.5) == {"tokens": 1000, "flops": 1e12, "seconds": 10}
    assert plot_bits.reached(points, 0.5) is None


def test_the_picture_has_each_run_against_each_axis(tmp_path: Path, figures: list[Any]) -> None:
    paths = [run(tmp_path / name, [3.0, x], 100) for name, x in (("a", 2.0), ("b", 1.5))]
    out = tmp_path / "points.json"
    drawn = ["--plot", str(tmp_path / "bits.png"), "--json", str(out)]
    assert plot_bits.main([*map(str, paths), *drawn]) == 0
    assert (tmp_path / "bits.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (figure,) = figures
    assert [axes.get_xlabel() for axes in figure.axes] == ["tokens", "FLOPs", "seconds"]
    curves = [[list(line.get_xdata()) for line in axes.lines] for axes in figure.axes]
    assert curves == [[[1000, 2000]] * 2, [[1e12, 2e12]] * 2, [[10, 20]] * 2]
    assert list(figure.axes[0].lines[1].get_ydata()) == [3.0, 1.5]
    stored = json.loads(out.read_text())
    assert [point["bits"] for point in stored["b"]] == [3.0, 1.5]


def test_a_validation_after_a_step_that_was_not_logged_counts(tmp_path: Path) -> None:
    path = run(tmp_path / "a", [3.0, 2.5], 100) / "metrics.jsonl"
    first, step, *others = path.read_text().splitlines()
    path.write_text("\n".join([first, *others]))
    assert json.loads(step)["step"] == 1
    assert [(point.bits, point.flops) for point in plot_bits.points(path)] == [
        (3.0, pytest.approx(1000 * FLOPS)),
        (2.5, pytest.approx(2000 * FLOPS)),
    ]


def test_a_run_without_validations_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(tmp_path / "a", [], 100)
    assert plot_bits.main([str(path)]) == 2
    assert "has no validation with bits per byte" in capsys.readouterr().err
