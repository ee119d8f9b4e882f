"""Choices and bounds of single knobs."""

from dataclasses import replace

import pytest
import torch

from phalanx.configs.bounds import choices
from phalanx.configs.fields import KnobFacts
from phalanx.configs.knobs import knobs
from phalanx.configs.schema import Config
from phalanx.kernels.registry import Facts, resolve
from tests.configs.test_validate import problems

TEXTS_WITHOUT_CHOICES = {
    "model.name",
    "parallel.pipeline_layout",
    "data.split",
    "data.cache",
    "run.name",
    "run.dir",
    "run.checkpoints",
    "run.resume",
    "run.machine",
    "run.start_over",
    "run.project",
    "run.record_routing",
    "model.moe.router.replay",
}


def test_every_knob_has_its_choices_or_bounds() -> None:
    names = {"run.recompute", "run.offload", "run.trackers"}
    kinds = (str, int | str, bool | str)
    texts = {path for path, knob in knobs().items() if knob.type in kinds} | names
    numbers = {path for path, knob in knobs().items() if knob.type in (int, float, int | str)}
    assert texts == set(choices()) | TEXTS_WITHOUT_CHOICES
    plain = KnobFacts()
    bounded = {
        path
        for path, knob in knobs().items()
        if replace(knob.facts, choices=(), formerly="", group="") != plain
    }
    assert bounded <= numbers and len(bounded) > 40


@pytest.mark.parametrize(
    ("knob", "op"),
    [
        ("kernels.backend", "grouped_mlp"),
        ("kernels.attention", "attention"),
        ("kernels.norm", "norm"),
    ],
)
def test_choices_of_kernels_are_those_of_the_registry(knob: str, op: str) -> None:
    facts = Facts(device="cpu", capability=None, dtype=torch.float32)
    with pytest.raises(ValueError, match="is unknown") as caught:
        resolve(op, "abacus", facts)
    names = str(caught.value).partition("use one of ")[2].removesuffix(" or auto").split(", ")
    assert set(choices()[knob]) == {*names, "auto"}


def test_defaults_are_within_their_own_bounds() -> None:
    assert problems(Config(), 1) == []
