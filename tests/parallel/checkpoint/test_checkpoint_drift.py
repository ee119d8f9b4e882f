"""Differences that a configuration may have from that of the checkpoint which a run resumes."""

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.parallel.checkpoint import start
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch
from phalanx.parallel.checkpoint.start import compare
from tests.support.runs import TINY, records, run

CONFIG: dict[str, Any] = {
    "model": {"name": "a", "layers": 4, "moe": {"router": {"aux_loss": 0.1, "bias_rate": 1e-3}}},
    "data": {"seed": 1, "blend": ["x"], "micro_batch": 2, "sequence_length": 16},
    "optim": {"lr": 1e-3},
    "parallel": {"expert": 2},
    "precision": {"recipe": "bf16", "hidden": "bf16"},
    "run": {"steps": 10},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(CONFIG))
    *groups, key = path.split(".")
    section = config
    for group in groups:
        section = section[group]
    section[key] = value
    return config


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("model.layers", 6),
        ("model.moe.router.bias_rate", 0.0),
        ("precision.recipe", "fp32"),
        ("data.seed", 2),
        ("data.sequence_length", 32),
    ],
)
def test_drift_refused(knob: str, value: Any) -> None:
    with pytest.raises(CheckpointMismatch) as caught:
        compare(CONFIG, changed(knob, value))
    assert knob in str(caught.value) and "run.resume=never" in str(caught.value)


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("model.name", "b"),
        ("model.moe.router.aux_loss", 0.2),
        ("model.moe.router.bias_rate", 1e-4),
        ("model.new_knob", 1),
        ("precision.recipe", "fp8_block"),
        ("precision.hidden", "fp8"),
        ("optim.lr", 1.0),
        ("parallel.expert", 4),
        ("run.steps", 20),
        ("data.micro_batch", 1),
        ("data.blend", ["y"]),
    ],
)
def test_drift_allowed_and_told(knob: str, value: Any) -> None:
    lines = compare(CONFIG, changed(knob, value))
    assert [line.split()[0] for line in lines] == ([] if "new" in knob else [knob])


@pytest.mark.parametrize(("before", "refused"), [("bf16", False), ("fp32", True)])
def test_precision_under_its_old_name_is_compared(before: str, refused: bool) -> None:
    old = {key: value for key, value in CONFIG.items() if key != "precision"}
    old["run"] = {"precision": before, "steps": 10}
    new = changed("precision.recipe", "fp8_block")
    if refused:
        with pytest.raises(CheckpointMismatch, match="go on with precision.recipe=fp32,"):
            compare(old, new)
    else:
        assert compare(old, new) == ["precision.recipe bf16 -> fp8_block"]


def test_only_stages_that_have_not_begun_may_change() -> None:
    """Stages begin at samples 7, 20 and 21 of 16 tokens; the first is in a checkpoint of 20."""
    saved = changed("data.stages", ["100:1/1", "320:1/0"])
    for stages in (["100:1/1"], ["100:1/1", "321:0/1"]):
        lines = compare(saved, changed("data.stages", stages), 20)
        assert [line.split()[0] for line in lines] == ["data.stages"]
    for stages in ([], ["100:1/2", "320:1/0"], ["100:1/1", "304:1/0"]):
        with pytest.raises(CheckpointMismatch, match=r"data\.stages"):
            compare(saved, changed("data.stages", stages), 20)
    assert compare(CONFIG, changed("data.stages", ["320:1/0"]), 20) != []  # of an older version
    with pytest.raises(CheckpointMismatch, match=r"go on with data\.stages"):
        compare(CONFIG, changed("data.stages", ["320:1/0"]), 21)


def test_drift_diff_reads_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "start_over_override", lambda: "run.start_over=1")
    config = changed("model.layers", 6)
    config["data"]["seed"] = 7
    with pytest.raises(CheckpointMismatch) as caught:
        compare(CONFIG, config)
    assert str(caught.value).splitlines() == [
        "this run is not configured as its checkpoint:",
        "                checkpoint  now",
        "  model.layers  4           6",
        "  data.seed     1           7",
        "go on with model.layers=4 data.seed=1,",
        "or start anew with run.resume=never and another run.name or run.start_over=1",
    ]


@pytest.mark.dist
def test_a_run_goes_on_in_fp8_and_back(tmp_path: Path) -> None:
    """Checkpoints of either are those of the other; the change is told."""
    base = [*TINY, "data=synthetic"]
    base += ["kernels=reference", f"run.dir={tmp_path}"]
    steps = {2: "bf16", 3: "fp8_block", 4: "bf16"}
    for at, (step, precision) in enumerate(steps.items()):
        (main,) = run(1, [*base, f"precision={precision}", f"run.steps={step}"])
        assert main.code == 0, main.err
        before = list(steps.values())[at - 1]
        assert (f"precision.recipe {before} -> {precision}" in main.out + main.err) == (at > 0)
    losses = [record["loss"] for record in records(tmp_path / "run") if "loss" in record]
    assert len(losses) == 4
    (main,) = run(1, [*base, "precision=fp32", "run.steps=5"])
    assert main.code == 2 and "go on with precision.recipe=bf16" in main.err


def test_the_optimizer_is_of_one_kind() -> None:
    """Checkpoints of versions that had AdamW alone do not name it; weights alone go with any."""
    muon = {"optim": {"kind": "muon", "lr": 1.0}}
    for saved in ({"optim": {"kind": "adamw", "lr": 1.0}}, {"optim": {"lr": 1.0}}):
        with pytest.raises(CheckpointMismatch, match="go on with optim.kind=adamw,"):
            compare(saved, muon)
        assert compare(saved, {"optim": {"kind": "adamw", "lr": 1.0}}) == []
    with pytest.raises(CheckpointMismatch, match="go on with optim.kind=muon,"):
        compare(muon, {"optim": {"kind": "adamw", "lr": 1.0}})
    assert compare({"model": {"layers": 2}}, muon | {"model": {"layers": 2}}) == []
