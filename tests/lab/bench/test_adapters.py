"""The benchmark of the adapters on a CPU, in tiny sizes."""

import pytest

pytest.importorskip("transformers")

from phalanx.scripts.lab.bench.adapters.__main__ import main


def test_ours_and_theirs_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["qwen3", "gpt_oss", "--tiny", "--rounds", "1"]) == 0
    rows = [
        [cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()
    ]
    for part in ("qwen3", "gpt_oss"):
        sides = {row[2]: row for row in rows if row[1:2] == [part]}
        assert sides["phalanx"][6] == "1.00"
        others = ("phalanx, converted",) if part == "gpt_oss" else ()
        for side in ("grouped_mm", "eager", *others):
            assert float(sides[side][4]) > 0 and float(sides[side][7]) < 1e-5
        assert "kernels" in sides["sonicmoe"][7]


def test_a_part_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["qwen4"])
    assert (
        "qwen4: a part is one of qwen3, qwen3_loss, gpt_oss, torchtitan" in capsys.readouterr().err
    )
