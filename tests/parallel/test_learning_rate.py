"""The learning rate of a run, and the line about it when a run is resumed on another curve."""

import itertools
from dataclasses import asdict, replace
from typing import Any

import pytest

from phalanx.configs.arithmetic.batch_sizes import in_steps
from phalanx.configs.bounds import choices
from phalanx.configs.load import load
from phalanx.configs.schema import DataConfig, OptimConfig
from phalanx.configs.validate import validate
from phalanx.parallel.learning_rate import Curve, change
from tests.support.advice import advised, tried

OPTIM = OptimConfig(lr=2e-3, min_lr=2e-4, warmup_steps=10)


def saved(optim: OptimConfig, steps: int) -> dict[str, Any]:
    return {"optim": asdict(optim), "run": {"steps": steps}}


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("cosine", [2e-3, 1.1e-3, 2e-4, 2e-4]),
        ("linear", [2e-3, 1.1e-3, 2e-4, 2e-4]),
        ("constant", [2e-3, 2e-3, 2e-3, 2e-3]),
        ("WSD", [2e-3, 2e-3, 2e-4, 2e-4]),
        ("inverse-square-root", [2e-3, 6.237550e-4, 2e-4, 2e-4]),
    ],
)
def test_a_curve_warms_up_and_decays(schedule: str, rates: list[float]) -> None:
    curve = Curve.of(replace(OPTIM, schedule=schedule), 50)
    assert [curve.at(n) for n in (1, 5)] == pytest.approx([2e-4, 1e-3])
    assert [curve.at(n) for n in (10, 30, 50, 51)] == pytest.approx(rates)


@pytest.mark.parametrize("schedule", choices()["optim.schedule"])
@pytest.mark.parametrize("warmup", [0, 1, 10, 50, 90])
@pytest.mark.parametrize("decay", [100, 1000])
def test_no_seam_of_a_schedule_is_a_jump(schedule: str, warmup: int, decay: int) -> None:
    """Warm-up to decay, stable to decay, and the last step of the decay to those after it."""
    cfg = load([f"optim.schedule={schedule}", f"optim.warmup_steps={warmup}", "run.steps=1100"])
    cfg.optim.lr, cfg.optim.min_lr, cfg.optim.decay_steps = 2e-3, 2e-4, decay
    validate(cfg, 1)
    curve = Curve.of(cfg.optim, 1100)
    rates = [curve.at(n) for n in range(1, decay + 21)]
    fall = [after / before for before, after in itertools.pairwise(rates)]
    assert min(fall) > 0.5 and max(fall[max(warmup - 1, 0) :]) <= 1 + 1e-12
    assert rates[max(warmup - 1, 0)] == pytest.approx(2e-3, rel=0.01)
    end = 2e-3 if schedule == "constant" else 2e-4
    assert rates[decay - 1 :] == pytest.approx([end] * 21)


def test_following_a_longer_run_is_told_with_what_keeps_the_curve() -> None:
    line = change(saved(OPTIM, 10), OPTIM, 20, done=10)
    assert line == (
        "the learning rate of step 11 goes from 0.0002 to 0.00196, because optim.decay_steps "
        "follows run.steps (10 -> 20): set optim.decay_steps=10 optim.warmup_steps=9 to keep the "
        "old curve"
    )


CHANGES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {}, "optim.decay_steps follows run.steps (20 -> 40)"),
    ({"decay_steps": 25}, {"decay_steps": 50}, "optim.decay_steps 25 -> 50"),
    ({"decay_steps": 25}, {}, "optim.decay_steps 25 -> 40"),
    ({}, {"decay_steps": 50}, "optim.decay_steps 20 -> 50"),
    ({"decay_steps": 40}, {"decay_steps": 40, "lr": 4e-3}, "optim.lr 0.002 -> 0.004"),
    ({"decay_steps": 40}, {"decay_steps": 40, "min_lr": 1e-3}, "optim.min_lr 0.0002 -> 0.001"),
    ({"decay_steps": 40}, {"decay_steps": 40, "warmup_steps": 30}, "optim.warmup_steps 10 -> 30"),
    ({"decay_steps": 40}, {"decay_steps": 40, "schedule": "WSD"}, "optim.schedule cosine -> WSD"),
]


@pytest.mark.parametrize(("old", "new", "reason"), CHANGES)
def test_every_knob_of_the_curve_is_told_and_can_be_kept(
    old: dict[str, Any], new: dict[str, Any], reason: str
) -> None:
    """The overrides that the line names are valid, and bring every rate back."""
    before, after = replace(OPTIM, **old), replace(OPTIM, **new)
    line = change(saved(before, 20), after, 40, done=20)
    assert f"because {reason}: set " in line
    given = [f"optim.{name}={value}" for name, value in asdict(after).items()]
    cfg = tried([*given, "run.steps=40"], *advised(line))
    kept, meant = Curve.of(cfg.optim, 40), Curve.of(before, 20)
    assert [kept.at(n) for n in range(1, 41)] == [meant.at(n) for n in range(1, 41)]
    assert not change(saved(before, 20), cfg.optim, 40, done=20)


def test_ends_in_tokens_are_told_in_steps_and_can_be_kept() -> None:
    """Steps of 8,192 tokens; the run decayed over 20 of them."""
    data = DataConfig(sequence_length=256, global_batch=32)
    before = replace(OPTIM, decay_tokens=20 * 8192.0)
    after = replace(OPTIM, decay_tokens=40 * 8192.0)
    config = saved(before, 20) | {"data": asdict(data)}
    now = in_steps(after, data)
    line = change(config, now, 40, done=15)
    assert "because optim.decay_steps 20 -> 40: set optim.decay_steps=20 " in line
    given = [f"optim.{name}={value}" for name, value in asdict(after).items()]
    cfg = tried([*given, "run.steps=40", "data.global_batch=32"], *advised(line))
    assert cfg.optim.decay_tokens == 0 and Curve.of(cfg.optim, 40).decay_steps == 20
    assert change(config, in_steps(before, data), 40, done=15) == ""


@pytest.mark.parametrize(
    ("optim", "steps", "done"),
    [
        (OPTIM, 20, 20),  # nothing is left to do
        (OPTIM, 10, 5),  # the same curve
        (replace(OPTIM, decay_steps=10, warmup_steps=9), 20, 10),  # kept
        (replace(OPTIM, eps=1e-6), 10, 5),
    ],
)
def test_nothing_is_told_where_the_next_rate_is_the_same(
    optim: OptimConfig, steps: int, done: int
) -> None:
    assert change(saved(OPTIM, 10), optim, steps, done) == ""


def test_a_constant_rate_may_be_extended() -> None:
    constant = replace(OPTIM, schedule="constant")
    assert change(saved(constant, 50), constant, 100, done=50) == ""


def test_checkpoints_of_other_versions() -> None:
    """Knobs that only one of them knows; no optimizer at all."""
    config = saved(OPTIM, 10)
    config["optim"]["unheard_of"] = 1
    del config["optim"]["moments"]
    assert change(config, OPTIM, 10, done=5) == ""
    assert change({"model": {}}, OPTIM, 10, done=5) == ""
