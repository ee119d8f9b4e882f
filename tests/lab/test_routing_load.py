"""scripts/lab/routing_load.py: its table, its file, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.moe.router.recording import write
from phalanx.scripts.lab import routing_load


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """1,024 tokens of two layers: one even, and one whose expert 0 has three quarters."""
    even, uneven = np.repeat(np.arange(16), 64), np.repeat(np.arange(16), [784, *[16] * 15])
    ids = {"layer.1": even[:, None], "layer.2": uneven[:, None]}
    write(path := tmp_path / "file", ids, model="tiny", experts=16, step=7)
    return path


def test_table_and_file(recorded: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"
    options = [
        "--expert",
        "2",
        "8",
        "--replica-slots",
        "0",
        "2",
        "--tokens",
        "512",
        "--cost",
        "0",
        "--json",
    ]
    assert routing_load.main([str(recorded), *options, str(out)]) == 0
    head, _, names, rule, *rows, _, repeated = capsys.readouterr().out.splitlines()
    assert head == (
        "file: 1,024 tokens of tiny after step 7, 2 layers, top 1 of 16 experts; "
        "512 tokens a rank and micro-batch; a copy costs 0 rows"
    )
    assert names.count("|") == rule.count("|") == rows[0].count("|")
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[:3] for row in cells] == [[r, n, "1"] for r in "28" for n in "02"]
    # Expert 0 has 784 tokens of a mean of 64, its rank of two 896 of 512.
    assert cells[0][3:] == ["12.25", "6.62", "1.38", "1.75", "0.00", "1.51"]
    assert float(cells[1][6]) < 1.25 and float(cells[1][7]) > 0
    assert repeated == "4,096 tokens of 8 ranks repeat the recorded ones."
    actual = json.loads(out.read_text())
    assert (actual["recorded"]["step"], actual["tokens"], actual["cost"]) == (7, 512, 0)
    assert actual["loads"][0]["layers"]["layer.2"]["rows"] == 896
    assert [load["replica_slots"] for load in actual["loads"]] == [0, 2, 0, 2]


def test_copies_that_a_run_would_not_make(recorded: Path, capsys) -> None:
    """Replicas of the layer whose rank has 896 of 1,024 rows save less than 512 rows."""
    replicas = {}
    for least in ("0", "512"):
        options = f"--expert 2 --replica-slots 2 --tokens 512 --cost 0 --least {least}".split()
        assert routing_load.main([str(recorded), *options]) == 0
        head, _, _, _, row = capsys.readouterr().out.splitlines()
        replicas[least] = float(row.strip("| ").split(" | ")[7])
    assert head.endswith("a copy costs 0 rows and a layer with copies 512")
    assert replicas["0"] > 0 and replicas["512"] == 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--expert 3", "--expert 3: 16 experts do not divide over so many"),
        ("--expert 2 0", "--expert 0: must be at least 1"),
        (
            "--expert 16 --replica-slots 1",
            "at most 512 experts on 8 ranks, not 16 on 16: set parallel.ex",
        ),
        ("--cost -1", "--cost -1: must be at least 0"),
        ("--least -1", "--least -1: must be at least 0"),
        ("--replica-slots 1 -2", "--replica-slots -2: must be at least 0"),
        ("--tokens 0", "--tokens 0: must be at least 1"),
        ("--micro-batches 0", "--micro-batches 0: must be at least 1"),
        ("--json /nowhere/out.json", "--json /nowhere/out.json: there is no folder /nowhere"),
    ],
)
def test_bad_input_is_told_in_a_line(options: str, why: str, recorded: Path, capsys) -> None:
    given = ["--tokens", "64", *options.split()]
    assert routing_load.main([str(recorded), *given]) == 2
    err = capsys.readouterr().err
    assert err.startswith("routing_load: ") and why in err and err.count("\n") == 1


def test_a_file_that_is_not_there(capsys) -> None:
    assert routing_load.main(["none"]) == 2
    assert "none cannot be read: there is no such file" in capsys.readouterr().err
