"""`scripts/lab/plot_losses.py`: runs and files in, a table, a file and a picture out."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.scripts.lab import plot_losses

FACTS = {"model": "tiny", "ranks": 2, "device": "CPU process", "sequence": 256}


def _run(folder: Path, losses: list[float | None], **facts: Any) -> Path:
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": i + 1, "loss": x, "lr": 1.0}) for i, x in enumerate(losses)]
    start = json.dumps({"event": "start", "at": 0} | FACTS | facts)
    text = "\n".join([start, *lines, '{"event": "end"}', '{"st']) + "\n"
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_table_has_means_of_the_first_and_how_far_the_others_are(tmp_path: Path, capsys) -> None:
    one = _run(tmp_path / "one", [4.0, 2.0, 1.0, 3.0, 9.0])
    two = _run(tmp_path / "two", [4.5, 2.5, 1.0, 2.0])  # a step less, which does not count
    out = tmp_path / "both.json"
    assert plot_losses.main([str(one), str(two), "--parts", "2", "--json", str(out)]) == 0
    *rows, drawn = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["steps", "one", "two", "-", "one"]
    assert rows[1:] == [["1-2", "3.0000", "+0.5000"], ["3-4", "2.0000", "-0.5000"]]
    assert drawn == ["drawn:", str(tmp_path / "losses.png")]
    assert (tmp_path / "losses.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert plot_losses.main([str(out), "--parts", "2"]) == 0  # what it wrote says the same
    repeated = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert repeated == [*rows, drawn]


@pytest.mark.parametrize("steps", [1, 2, 5, 20, 500])
@pytest.mark.parametrize("runs", [1, 2])
def test_a_picture_shows_every_run_and_says_of_what(
    steps: int, runs: int, tmp_path: Path, figures: list[Any]
) -> None:
    experts = {"a": "torch", "b": "reference"}
    paths = [
        _run(tmp_path / name, [3 - 0.001 * i + x for i in range(steps)], experts=experts[name])
        for name, x in PAIR[:runs]
    ]
    assert plot_losses.main([*map(str, paths), "--plot", str(tmp_path / "p.png")]) == 0
    (figure,) = figures
    what = ["tiny on 2 CPU processes, sequence 256", ", torch experts"]
    assert figure.get_suptitle().replace(what[1], "") == what[0]
    assert (what[1] in figure.get_suptitle()) == (runs == 1)
    above, *below = figure.axes
    assert len(below) == runs - 1
    named = [entry.get_text() for entry in above.get_legend().get_texts()]
    assert named == (["a"] if runs == 1 else ["a (torch experts)", "b (reference experts)"])
    for axes in figure.axes:
        curves = [line for line in axes.lines if line.get_alpha() is None]
        assert len(curves) == runs
        for line in curves:
            points = len(line.get_xdata())
            assert points >= 0.9 * steps and np.isfinite(line.get_ydata()).all()
            assert line.get_marker() == "o" or points > 50  # a line of one point is not seen
    low, high = above.get_xlim()
    assert low <= 1 and high >= steps
    assert figure.axes[-1].get_xlabel() == "step" and "loss" in above.get_ylabel()


def test_runs_of_another_batch_are_compared_by_tokens(
    tmp_path: Path, capsys, figures: list[Any]
) -> None:
    """Both have the loss 9 - tokens / 10,000; by steps they would differ."""
    losses = {batch: [9 - 0.0256 * batch * (i + 1) for i in range(80)] for batch in (1, 2)}
    paths = [_run(tmp_path / f"b{n}", of[: 80 // n], batch=n) for n, of in losses.items()]
    out = tmp_path / "both.json"
    given = ["--parts", "4", "--plot", str(tmp_path / "p.png")]
    assert plot_losses.main([*map(str, paths), *given, "--json", str(out)]) == 0
    output = capsys.readouterr().out
    head, *rows = output.splitlines()
    assert head.split() == ["tokens", "b1", "b2", "-", "b1"]
    assert [row[:14].strip() for row in rows[:2]] == ["512 to 5.5 k", "5.5 k to 10.5"]
    assert float(rows[0].split()[-2]) == pytest.approx(9 - 3e3 / 1e4, abs=0.02)
    assert all(abs(float(row.split()[-1])) < 0.02 for row in rows[:4])
    assert rows[4:7] == [
        "b1: batch 1",
        "b2: batch 2",
        "tokens up to a step differ: the runs are compared by tokens, not by steps",
    ]
    above, below = figures[0].axes
    assert below.get_xlabel() == "tokens"
    named = [entry.get_text() for entry in above.get_legend().get_texts()]
    assert named == ["b1 (batch 1)", "b2 (batch 2)"]
    separate = [line.get_ydata() for line in below.lines]
    assert max(np.abs(line).max() for line in separate) < 1e-9
    assert plot_losses.main([str(out), *given]) == 0  # a file of both says the same
    assert capsys.readouterr().out == output


def test_tokens_that_were_logged_count_and_are_kept(tmp_path: Path, capsys) -> None:
    """A run resumed with another batch has read the logged number of tokens."""
    one, two = (_run(tmp_path / name, [3.0, 2.0, 1.0], batch=1) for name in ("one", "two"))
    records = [{"step": n, "loss": 4.0 - n, "tokens": 100 * n * n} for n in (1, 2, 3)]
    (two / "metrics.jsonl").write_text(
        "\n".join(map(json.dumps, [{"event": "start", **FACTS}, *records]))
    )
    out, picture = tmp_path / "both.json", ["--plot", str(tmp_path / "p.png")]
    assert plot_losses.main([str(one), str(two), "--json", str(out), *picture]) == 0
    output = capsys.readouterr().out
    assert "compared by tokens" in output
    assert plot_losses.main([str(out), *picture]) == 0 and capsys.readouterr().out == output
    assert json.loads(out.read_text())["tokens read"] == {"two": {"1": 100, "2": 400, "3": 900}}


def test_a_part_without_a_loss_of_a_run_is_a_dash(tmp_path: Path, capsys) -> None:
    """The second run passes over 400 tokens behind its second step."""
    for name, far in (("one", 0), ("two", 400)):
        records = [
            {"step": n, "loss": 8.0 - n, "tokens": 100 * n + (n > 2) * far} for n in range(1, 9)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    runs = [str(tmp_path / f"{name}.jsonl") for name in ("one", "two")]
    assert plot_losses.main([*runs, "--parts", "3", "--plot", str(tmp_path / "p.png")]) == 0
    _, *rows, _, _ = capsys.readouterr().out.splitlines()
    assert [row.split()[-2:] for row in rows] == [
        ["6.0000", "+0.5000"],
        ["3.5000", "-"],
        ["1.0000", "+3.5000"],
    ]


@pytest.mark.parametrize("odd", ['"two"', "2.5", "[2]", "null"])
def test_a_step_that_is_no_whole_number_is_one_line(odd: str, tmp_path: Path, capsys) -> None:
    run = _run(tmp_path / "run", [3.0, 2.0])
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {odd}, "loss": 1.0}}\n')
    assert plot_losses.main([str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"plot_losses: {run / 'metrics.jsonl'} has a line of step ")
    assert line.endswith("no whole number: remove it")


def test_tokens_that_are_text_are_counted_by_the_batch(tmp_path: Path, capsys) -> None:
    one, two = (_run(tmp_path / name, [3.0, 2.0], batch=1) for name in ("one", "two"))
    with (two / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "tokens": "few"}\n{"step": 2, "tokens": "many"}\n')
    assert plot_losses.main([str(one), str(two), "--plot", str(tmp_path / "p.png")]) == 0
    assert "+0.0000" in capsys.readouterr().out


def test_long_names_have_numbers_in_the_table(tmp_path: Path, capsys, figures: list[Any]) -> None:
    names = ["precision=bf16 kernels=torch run.graph=off " + end for end in "ab"]
    curves = {name: plot_losses.Curve({1: 2.0, 2: 1.0}, {}, {}) for name in names}
    lines = plot_losses.table(curves, None).splitlines()
    assert lines[:2] == [f"[1] {names[0]}", f"[2] {names[1]}"]
    assert lines[2].split() == ["steps", "[1]", "[2]", "-", "[1]"]
    assert max(map(len, lines[2:])) < 60
    plot_losses.plot(curves, tmp_path / "p.png", "")
    below = figures[0].axes[1]
    assert below.get_title(loc="left") == f"loss minus that of {names[0]}"
    assert below.get_ylabel() == "nats a token"


def test_without_matplotlib_the_table_is_there(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = str(_run(tmp_path / "a", [2.0, 1.0]))
    assert plot_losses.main([run]) == 0
    assert capsys.readouterr().out.endswith("pip install 'matplotlib>=3.11.2,<4'\n")
    assert plot_losses.main([run, "--plot", str(tmp_path / "p.png")]) == 2
    assert "needs matplotlib" in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart(tmp_path: Path, capsys) -> None:
    runs = [_run(tmp_path / where / "tiny", [x]) for where, x in (("x", 2.0), ("y", 3.0))]
    assert plot_losses.main([*map(str, runs), "--plot", str(tmp_path / "p.png")]) == 0
    head, row, _ = capsys.readouterr().out.splitlines()
    assert head.split() == ["steps", "x/tiny", "y/tiny", "-", "x/tiny"]
    assert row.split() == ["1-1", "2.0000", "+1.0000"]


def test_runs_without_a_common_step_are_refused(tmp_path: Path, capsys) -> None:
    one, two = _run(tmp_path / "one", [1.0]), tmp_path / "two.jsonl"
    two.write_text('{"step": 2, "loss": 1.0}\n')
    assert plot_losses.main([str(one), str(two)]) == 2
    assert "the runs have no step in common" in capsys.readouterr().err


def test_losses_that_are_no_numbers_are_told(tmp_path: Path, capsys) -> None:
    one = _run(tmp_path / "one", [4.0, None, 2.0, math.nan, 1.0])
    two = _run(tmp_path / "two", [4.0, 3.0, 2.0, 1.0, 1.0])
    out = tmp_path / "both.json"
    assert plot_losses.main([str(one), str(two), "--json", str(out)]) == 0
    output = capsys.readouterr().out
    assert "one: 2 steps with a loss that is NaN or infinite are left out: 2, 4\n" in output
    assert "two: " not in output and "nan" not in output
    assert plot_losses.main([str(out)]) == 0
    assert capsys.readouterr().out == output, "what it wrote says the same"
    assert plot_losses.main([str(_run(tmp_path / "three", [None, None]))]) == 2
    assert "has no loss that is a number: all are NaN or infinite" in capsys.readouterr().err
    out.write_text('{"one": {"1": NaN}}')
    assert plot_losses.main([str(out)]) == 2
    assert "is no file of --json" in capsys.readouterr().err


PAIR = (("a", 0.0), ("b", 0.02))


@pytest.mark.parametrize(
    ("losses", "given", "why"),
    [
        ([], ["--parts", "1"], "has no losses: give the folder of a run"),
        ([1.0, 2.0], ["--parts", "3"], "--parts 3: must be 1 to 2"),
    ],
)
def test_bad_input_is_told_in_a_line(losses, given, why, tmp_path: Path, capsys) -> None:
    run = _run(tmp_path / "run", losses)
    assert plot_losses.main([str(run), *given]) == 2
    assert why in capsys.readouterr().err
    assert plot_losses.main([str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
