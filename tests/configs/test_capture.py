"""Why steps cannot be captured: one reason each, of an error where forced, of a choice by auto."""

from unittest import mock

import pytest

from phalanx.configs.capture import not_capturable, resolved_graph
from phalanx.configs.load import load
from phalanx.configs.tables.transports import TRANSPORTS
from phalanx.configs.validate import ConfigError, validate
from tests.support.additions import COUNTING_TRANSPORTS

AGAINST = {
    "run.device=cpu": "needs CUDA",
    "kernels=megatron": "megatron experts count their rows on the host",
    "kernels.backend=reference": "reference experts count their rows on the host",
    "kernels.attention=reference": "kernels.attention=reference is for checks of eager steps",
    "parallel.dispatch=broadcasts": "parallel.dispatch=broadcasts counts rows on the host",
    "kernels.attention=te parallel.context=2": (
        "kernels.attention=te passes keys and values from rank to rank"
    ),
}


@mock.patch.dict(TRANSPORTS, COUNTING_TRANSPORTS)
@pytest.mark.parametrize("given", AGAINST)
def test_auto_is_off_for_the_reason_with_which_a_forced_graph_is_refused(given: str) -> None:
    overrides = given.split()
    auto, forced = load(overrides), load([*overrides, "run.graph=full_iteration"])
    validate(auto, 4)
    assert not_capturable(auto) == AGAINST[given] and resolved_graph(auto) == "off"
    with pytest.raises(ConfigError) as caught:
        validate(forced, 4)
    assert str(caught.value) == (
        f"run.graph=full_iteration cannot run: {AGAINST[given]}; set run.graph=auto"
    )
    assert resolved_graph(forced) == "full_iteration"  # never silently something else
    validate(load([*overrides, "run.graph=off"]), 4)


@pytest.mark.parametrize(
    "given",
    [
        "run.device=cuda",
        "model=tiny_gpt_oss",
        "model=tiny_deepseek",
        "kernels=fused",
        "kernels=torch",
        "kernels=te",
        "kernels.attention=flex",
        "parallel.tensor=2",
        "parallel.context=2",
        "kernels.attention=te",
        "parallel.pipeline=2",
        "parallel.dispatch=symm",
        "parallel.dispatch=hier",
        "parallel.dispatch=alltoall",
        "run.eval_interval=2",
        "run.bad_steps=rollback",
        "run.skip_spikes=6",
        "run.profile=[2,3]",
        "run.deterministic=true",
        "optim.moments=bf16",
        "run.steps=1",
        "run.recompute=full",
        "run.recompute=[norm,attention,mlp,expert_h]",
        "run.offload=[residual,attention,expert_h]",
    ],
)
def test_all_else_is_captured(given: str) -> None:
    assert resolved_graph(load([given])) == "full_iteration"
    validate(load([given, "run.graph=full_iteration"]), 4)
    assert resolved_graph(load([given, "run.graph=off"])) == "off"
