"""Which knobs of a checkpoint's configuration are understood, ignored or refused."""

from dataclasses import asdict
from typing import Any

import pytest

from phalanx.configs.knobs import knobs
from phalanx.configs.load import load
from phalanx.parallel.checkpoint.saved_knobs import CheckpointMismatch, understood, unknown


def test_a_configuration_of_this_version_is_understood_whole() -> None:
    saved = understood(asdict(load(["model=tiny_deepseek", "data.blend=['0.5',a]"])))
    assert set(saved.values) == set(knobs()) and saved.ignored == () and saved.ignored_note() == ""


def test_a_knob_has_its_present_name() -> None:
    assert understood({"run": {"precision": "fp32"}}).values == {"precision.recipe": "fp32"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model": {"new_model_knob": 1}}, "model.new_model_knob=1"),
        ({"model": {"moe": {"router": {"shape": "square"}}}}, "model.moe.router.shape=square"),
        ({"precision": {"sums": "fp8"}}, "precision.sums=fp8"),
        ({"data": {"order": [1]}}, "data.order=[1]"),
        ({"model": {"layers": "two"}}, "model.layers=two"),
        ({"model": {"norm_eps": float("nan")}}, "model.norm_eps=NaN"),
        ({"model": {"bias": 1}}, "model.bias=1"),
        ({"model": 3}, "model=3"),
        ({"model": {"a\nb": 1}}, r"model.a\nb=1"),
    ],
)
def test_what_weights_and_text_depend_on_has_to_be_understood(
    config: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointMismatch) as caught:
        understood(config | {"optim": {"lr": 1.0}})
    assert str(caught.value) == (
        f"the checkpoint has {named}, which this version does not know: use the version that "
        "wrote it, or a newer one"
    )


def test_all_are_named_up_to_some() -> None:
    with pytest.raises(CheckpointMismatch) as caught:
        understood({"model": {f"k{i}": i for i in range(12)}})
    assert "model.k0=0, model.k1=1," in str(caught.value)
    assert "model.k7=7, 4 more, which" in str(caught.value)


def test_others_are_ignored_and_told() -> None:
    config = {"optim": {"lr": 1, "tempo": 3}, "network": {"hops": 2}, "run": {"steps": "many"}}
    saved = understood(config)
    assert saved.values == {"optim.lr": 1}
    assert saved.ignored_note() == (
        "knobs that this version does not know are ignored: optim.tempo, network.hops, run.steps"
    )
    assert unknown(config) == {"optim.tempo", "network.hops", "run.steps"}


def test_a_removed_knob_is_told_unless_it_asked_for_what_is_always_done() -> None:
    saved = understood({"precision": {"wgrad_blocks": "square"}})
    assert saved.values == {} and saved.ignored_note() == ""
    assert unknown({"precision": {"wgrad_blocks": "square"}}) == set()
    config = {"precision": {"wgrad_blocks": "vector"}, "optim": {"tempo": 3}}
    assert understood(config).ignored_note() == (
        "precision.wgrad_blocks=vector no longer exists, as operands of weight gradients always "
        "have blocks of 128 tokens x 128 channels; knobs that this version does not know are "
        "ignored: optim.tempo"
    )
    assert unknown(config) == {"precision.wgrad_blocks", "optim.tempo"}


@pytest.mark.parametrize("config", [None, 3, [1]])
def test_what_is_no_configuration(config: Any) -> None:
    with pytest.raises(CheckpointMismatch, match="no configuration"):
        understood(config)
