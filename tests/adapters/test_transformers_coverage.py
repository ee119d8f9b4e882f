"""Experts that transformers does not dispatch: a warning by class, and the list in the docs."""

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

import phalanx.adapters.transformers
from phalanx.adapters.transformers.loading import unreached
from tests.adapters.hf_classes import decorated
from tests.adapters.hf_models import model
from tests.adapters.test_transformers_classes import KNOWN, REFUSED, up_before_gate

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DbrxExperts": (
        "Dbrx",
        dict(d_model=48, n_heads=4, n_layers=1, attn_config=dict(rope_theta=1e4)),
    ),
    "DogeCDMoE": ("Doge", dict(is_moe=True, num_experts=16, num_hidden_layers=1)),
    "JetMoeParallelExperts": ("JetMoe", dict(num_hidden_layers=1)),
    "Llama4TextExperts": ("Llama4Text", dict(num_hidden_layers=1, interleave_moe_layer_step=1)),
    "LongcatFlashExperts": ("LongcatFlash", dict(num_layers=1)),
    "NllbMoeExperts": ("NllbMoe", dict(encoder_layers=4, decoder_layers=4)),
    "Step3p7Experts": ("Step3p7Text", dict(num_hidden_layers=4)),
    "SwitchTransformersExperts": (
        "SwitchTransformers",
        dict(num_layers=2, num_sparse_encoder_layers=2),
    ),
    "VitPoseNaiveMoe": ("VitPoseBackbone", dict(num_experts=3, num_hidden_layers=1)),
}
"""Models with experts that are not dispatched, and configs with a layer of them."""
NO_EFFECT = r"^{}: transformers does not dispatch these experts, so they are its own: experts_impl"


def made(name: str, implementation: str) -> Any:
    """A model on the meta device, without weights."""
    prefix, options = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**options)
    kinds = ("ForCausalLM", "Model", "")
    model_class = next(c for k in kinds if (c := getattr(transformers, prefix + k, None)))
    with torch.device("meta"):
        return model_class._from_config(config, experts_implementation=implementation)


@pytest.mark.parametrize("name", MODELS)
def test_experts_without_effect_are_named(name: str) -> None:
    with pytest.warns(UserWarning, match=NO_EFFECT.format(name)):
        made(name, "phalanx")


def test_other_implementations_and_dispatched_experts_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made("JetMoeParallelExperts", "eager").set_experts_implementation("batched_mm")
        model("gpt_oss", "phalanx")
        model("qwen3_moe", "eager").set_experts_implementation("phalanx")
        model("deepseek_v3", "phalanx")  # with dense layers and shared experts


def test_a_later_choice_is_checked_as_one_at_the_start_is() -> None:
    other = made("JetMoeParallelExperts", "eager")
    with pytest.warns(UserWarning, match=NO_EFFECT.format("JetMoeParallelExperts")):
        other.set_experts_implementation("phalanx")
    refused = model("qwen3_moe", "eager")
    experts = refused.model.layers[1].mlp.experts
    experts._apply_gate = lambda h: up_before_gate(experts, h)
    with pytest.raises(ValueError, match="^Qwen3MoeExperts: phalanx does not know the activation"):
        refused.set_experts_implementation("phalanx")


def test_a_model_that_is_constructed_directly() -> None:
    config = transformers.JetMoeConfig(num_hidden_layers=1, experts_implementation="phalanx")
    with torch.device("meta"), pytest.warns(UserWarning, match="JetMoeParallelExperts"):
        transformers.JetMoeForCausalLM(config)


class RemoteModel(PreTrainedModel):
    """A model from a hub, with experts as a list of modules."""

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.mlp = RemoteLayer()
        self.post_init()


class RemoteLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))


def test_lists_of_experts_are_called_by_their_owner() -> None:
    with pytest.warns(UserWarning, match=NO_EFFECT.format("RemoteLayer")):
        RemoteModel(PreTrainedConfig(experts_implementation="phalanx"))


def test_a_quantizer_that_replaces_experts() -> None:
    """As that of MXFP4 does, after the constructor."""
    made = model("gpt_oss", "phalanx")
    for layer in made.model.layers:
        layer.mlp.experts = type("Mxfp4GptOssExperts", (nn.Module,), {})()
    assert set(unreached(made)) == {"Mxfp4GptOssExperts"}


def test_weights_in_fp8_are_refused() -> None:
    experts = model("gpt_oss", "eager").model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.float8_e4m3fn), False)
    experts.config._experts_implementation = "phalanx"
    with pytest.raises(ValueError, match="^GptOssExperts: phalanx does not read quantized weigh"):
        phalanx.adapters.transformers.prepare(experts)


def classes_without_dispatch() -> set[str]:
    """Classes of experts in transformers' sources that lack its decorator.

    They are called experts or a mixture of experts, and contain no class of experts.
    """
    found, dispatched = set(), decorated().keys()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = path.read_text("utf-8")
        experts = re.findall(r"^class (\w*(?:Experts|Mo[eE]))\b", text, re.M)
        tree = ast.parse(text if experts else "")
        classes = {c.name: c for c in tree.body if isinstance(c, ast.ClassDef)}
        for name in {*experts} - dispatched:
            words = {n.id for n in ast.walk(classes[name]) if isinstance(n, ast.Name)}
            if not words.intersection(experts):
                found.add(name)
    return found


@pytest.mark.skipif(transformers.__version__ != KNOWN, reason="the list is that of one version")
def test_docs_say_which_classes_are_reached() -> None:
    missing = classes_without_dispatch() - {"InklingSharedExperts"}  # every token's
    assert missing == set(MODELS)
    text = " ".join((Path(__file__).parents[2] / "docs" / "adapters.md").read_text().split())
    total, names = re.findall(r"dispatches, (\d+) in 5\.23, .*? not dispatched are (.*?):", text)[0]
    assert int(total) == len(decorated())
    assert set(re.findall(r"`(\w+)`", names)) == missing
    assert len(REFUSED) == 4  # "but four"
