"""Routings written by hand or drawn: what is read, what is refused, and a replay of one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.configs.load import load
from phalanx.moe.router.recording import read_facts
from phalanx.scripts.lab import make_routing, routing_load
from phalanx.scripts.lab.routing_by_hand import random_choices, read_choices
from tests.support.runs import SMALL, records, run

MODEL = load(["model=tiny", "model.layers=3", "model.moe.dense_layers=1", "model.mtp_layers=1"])
LAYERS = ["layer.2", "layer.3", "prediction.1"]


def written(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_layers_that_are_not_named_take_those_of_all_others(tmp_path: Path) -> None:
    choices = {"layer.3": [[7, 0], [1, 2]], "*": [[0, 1], [2, 3]]}
    ids = read_choices(written(tmp_path / "x.json", choices), MODEL.model)
    assert list(ids) == LAYERS
    assert {name: of.tolist() for name, of in ids.items()} == {
        "layer.2": [[0, 1], [2, 3]],
        "layer.3": [[7, 0], [1, 2]],
        "prediction.1": [[0, 1], [2, 3]],
    }


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("[", "is not JSON"),
        ([[0, 1]], "is not an object of layers"),
        (
            {"layer.1": [[0, 1]]},
            "has 'layer.1', but the layers are layer.2 to prediction.1, or",
        ),
        ({"layer.2": [[0, 1]]}, "has no choices of layer.3, and none of '*'"),
        ({"*": [[0, 1, 2]]}, "'*' is not a list of 2 experts for each token (model.moe.top_k)"),
        ({"*": [[0, 1], [2]]}, "is not a list of 2 experts"),
        ({"*": [[0, 0.5]]}, "is not a list of 2 experts"),
        ({"*": 3}, "is not a list of 2 experts"),
        ({"*": [[0, 1], [2, 8]]}, "'*' has expert 8 of token 1, and experts are 0 to 7"),
        ({"*": [[0, 1], [-1, 8]]}, "'*' has expert -1 of token 1"),
        ({"*": [[0, 1], [3, 3]]}, "'*' has an expert twice of token 1"),
        ({"*": [[0, 1]], "layer.2": [[0, 1]] * 2}, "has 1 tokens of one layer and 2 of another"),
    ],
)
def test_what_is_no_routing_is_one_line(
    content: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "x.json", content)
    shape = ["model=tiny", "model.layers=3", "model.moe.dense_layers=1", "model.mtp_layers=1"]
    assert make_routing.main([str(tmp_path / "out"), *shape, "--choices", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"make_routing: {path}") and why in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_weights_say_how_readily_an_expert_is_drawn() -> None:
    ids = random_choices(MODEL.model, {3: 8.0}, 4000, seed=0)
    for of in ids.values():
        assert of.shape == (4000, 2) and (of[:, 0] != of[:, 1]).all()
        first = np.bincount(of[:, 0], minlength=8) / 4000
        assert first[3] == pytest.approx(8 / 15, abs=0.03)
        assert np.delete(first, 3) == pytest.approx([1 / 15] * 7, abs=0.02)
    again, other = (
        random_choices(MODEL.model, {3: 8.0}, 4000, 0),
        random_choices(MODEL.model, {3: 8.0}, 4000, 1),
    )
    assert all(np.array_equal(ids[name], again[name]) for name in LAYERS)
    assert not np.array_equal(ids["layer.2"], other["layer.2"])
    assert not np.array_equal(ids["layer.2"], ids["layer.3"])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--weight 8=2", "there is no expert 8: experts are 0 to 7"),
        ("--weight 1=0", "expert 1 has weight 0.0, which must be above 0"),
        ("--weight 1", "--weight 1: write EXPERT=WEIGHT, as in 3=8"),
        ("--tokens 70000", "70000 tokens: a file holds 1 to 65536"),
        ("--tokens 0", "0 tokens: a file holds 1 to 65536"),
        ("--tokens -1", "-1 tokens: a file holds"),
        ("--choices none.json", "none.json: No such file"),
        ("--choices none.json --seed 1", "leave out the other options"),
        ("model.moe.dense_layers=4", "tiny has no layer with experts"),
        ("model.moe.experts=0 model.moe.router.aux_loss=0", "tiny is a dense model: it has no"),
        ("model.layer=3", "model.layer: no such knob"),
    ],
)
def test_bad_options_are_told_in_a_line(
    options: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_routing.main([str(tmp_path / "out"), "model=tiny", *options.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("make_routing: ") and why in err and err.count("\n") == 1


@pytest.mark.dist
def test_what_was_made_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run by the printed command has the load that was written."""
    choices = written(tmp_path / "x.json", {"*": [[3, 0], [3, 1], [3, 2], [3, 4]]})
    out, shape = tmp_path / "out", ["model=tiny", "model.layers=2"]
    assert make_routing.main([str(out), *shape, "--choices", str(choices)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{out}: 4 tokens of tiny, 2 layers, top 2 of 8 experts"
    assert read_facts(out).step == 0
    assert routing_load.main([str(out), "--expert", "2", "--tokens", "4"]) == 0
    train, *overrides = said[1].split()
    assert train == "train.py"
    small = [*SMALL, "model.attention.head_dim=8", "data=synthetic", "run.steps=1"]
    (main,) = run(1, [*overrides, *small, f"run.dir={tmp_path}"])
    assert main.code == 0, main.err
    (record,) = records(tmp_path / "run")
    assert record["load_max"] == pytest.approx(4.0)  # half of the choices, of a mean of an eighth
