"""The benchmark of whole models of transformers on a CPU, with a tiny one."""

import pytest

pytest.importorskip("transformers")

from phalanx.scripts.lab.bench.adapters.whole import main


def test_sides_are_compared_and_one_that_cannot_run_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--tiny", "--rounds", "1", "--profile"]) == 0
    out = capsys.readouterr().out
    table = [[cell.strip() for cell in line.split("|")] for line in out.splitlines()]
    sides = {row[2]: row for row in table if row[1:2] == ["tiny"]}
    assert sides["grouped_mm"][5] == "1.00"
    for side in ("phalanx experts", "apply"):
        assert float(sides[side][3]) > 0 and sides[side][8] == sides["grouped_mm"][8]
    assert "CUDA graphs need a GPU" in sides["apply, captured"][8]
    assert "aten::mm" in out


def test_a_size_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["qwen4"])
    assert "qwen4: a size is one of qwen3_30b, qwen3_small" in capsys.readouterr().err
