"""`scripts/lab/transfer/coordinate_check.py`: its table and picture, and a small check itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.scripts.lab.transfer import coordinate_check
from tests.support import tiny_runs


@pytest.mark.dist
def test_two_widths_for_two_steps(tmp_path: Path) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    given = ["--widths", "64,32", "--steps", "2", "--json", out, "--plot", picture]
    done = tiny_runs.command(coordinate_check.main, *given, "model.layers=1")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.splitlines()]
    assert ["change", "of", "32", "64", "exponent"] in rows and picture.exists()
    found = json.loads(out.read_text())
    assert {name: sorted(runs) for name, runs in found.items()} == {
        "with mup": ["32", "64"],
        "without": ["32", "64"],
    }
    of_base = [found[name]["32"] for name in found]  # the same model
    assert of_base[0] == of_base[1] and len(of_base[0]) == 2


def test_the_picture_has_a_line_for_each_step(tmp_path: Path, figures: list[Any]) -> None:
    steps = [{"experts": size, "logits": 1.0} for size in (0.1, 0.2, 0.3)]
    found = {name: dict.fromkeys((64, 128, 256), steps) for name in ("with mup", "without")}
    coordinate_check.plot(found, tmp_path / "a.png")
    panels = figures[0].axes
    assert [len(panel.lines) for panel in panels] == [3] * 4
    assert list(panels[0].lines[2].get_ydata()) == [0.3] * 3


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--widths", "64"], "give two or more multiples of 32"),
        (["--widths", "64,100"], "give two or more multiples of 32"),
        (["--widths", "a,b"], "give two or more multiples of 32"),
        (["--steps", "0"], "--steps 0: must be at least 1"),
    ],
)
def test_mistakes_are_one_line(
    given: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coordinate_check.main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("coordinate_check: ") and why in line
