"""`scripts/plot_losses.py`: runs and files in, a table, a file and a picture out."""

import json
from pathlib import Path

import pytest

from scripts import plot_losses


def _run(folder: Path, losses: list[float]) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": i + 1, "loss": x, "lr": 1.0}) for i, x in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, '{"event": "end"}', '{"st']) + "\n")
    return folder


def test_table_has_means_of_the_first_and_how_far_the_others_are(tmp_path: Path, capsys) -> None:
    one = _run(tmp_path / "one", [4.0, 2.0, 1.0, 3.0, 9.0])
    two = _run(tmp_path / "two", [4.5, 2.5, 1.0, 2.0])  # a step less, which does not count
    out = tmp_path / "both.json"
    assert plot_losses.main([str(one), str(two), "--parts", "2", "--json", str(out)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["steps", "one", "two"]
    assert rows[1:] == [["1-2", "3.0000", "+0.5000"], ["3-4", "2.0000", "-0.5000"]]
    assert plot_losses.main([str(out), "--parts", "2"]) == 0  # what it wrote says the same
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == rows


def test_picture(tmp_path: Path) -> None:
    runs = [_run(tmp_path / name, [3 - 0.01 * i + x for i in range(40)]) for name, x in PAIR]
    assert plot_losses.main([*map(str, runs), "--plot", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


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
