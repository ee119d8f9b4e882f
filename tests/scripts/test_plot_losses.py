"""`scripts/plot_losses.py`: runs and files in, a table, a file and a picture out."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.scripts import plot_losses

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
    again = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert again == [*rows, drawn]


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
    what = ["tiny on 2 x CPU process, sequence 256", ", torch experts"]
    assert figure.get_suptitle().replace(what[1], "") == what[0]
    assert (what[1] in figure.get_suptitle()) == (runs == 1)
    above, *below = figure.axes
    assert len(below) == runs - 1
    named = [entry.get_text() for entry in above.get_legend().get_texts()]
    assert named == ["a", "b"][:runs]
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


def test_without_matplotlib_the_table_is_there(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run = str(_run(tmp_path / "a", [2.0, 1.0]))
    assert plot_losses.main([run]) == 0
    assert capsys.readouterr().out.endswith("pip install -e '.[dev]'\n")
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
    said = capsys.readouterr().out
    assert "one: 2 steps with a loss that is NaN or infinite are left out: 2, 4\n" in said
    assert "two: " not in said and "nan" not in said
    assert plot_losses.main([str(out)]) == 0
    assert capsys.readouterr().out == said, "what it wrote says the same"
    assert plot_losses.main([str(_run(tmp_path / "three", [None, None]))]) == 2
    assert "has no loss that is a number: all are NaN or infinite" in capsys.readouterr().err
    out.write_text('{"one": {"1": NaN}}')
    assert plot_losses.main([str(out)]) == 2
    assert "is no file of --json" in capsys.readouterr().err


PAIR = (("a", 0.0), ("b", 0.02))


@pytest.mark.parametrize(
    "losses, given, why",
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
