"""RMSNorms of models of transformers in torch's fused kernel."""

import copy
import io
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from phalanx.adapters.transformers import fuse_norms

SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=32)
KINDS: dict[str, tuple[Any, Any, int]] = {
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4), 9),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(**SIZES, num_local_experts=4), 5),
    # Its weights count from 1.
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES), 0),
}


def results(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    out = model(ids, labels=ids)
    leaves = [p for p in model.parameters() if p.requires_grad]
    return [out.logits, *torch.autograd.grad(out.loss, leaves)]


def saved_whole(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kind", KINDS)
def test_values_gradients_and_state_stay(kind: str) -> None:
    made, config, count = KINDS[kind]
    torch.manual_seed(0)
    model = made._from_config(config, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.1 * torch.randn_like(weight))
    fused = copy.deepcopy(model)
    assert fuse_norms(fused) == count
    ids = torch.randint(0, 64, (2, 9))
    for found, want in zip(results(fused, ids), results(model, ids), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)
    assert torch.equal(results(saved_whole(fused), ids)[0], results(fused, ids)[0])
    state = fused.state_dict()
    assert list(state) == list(model.state_dict())
    others = copy.deepcopy(fused)  # whose norms read their own weights
    with torch.no_grad():
        for weight in others.parameters():
            weight.mul_(0.5)
    assert torch.equal(results(fused, ids)[0], results(copy.deepcopy(fused), ids)[0])
    assert not torch.equal(results(fused, ids)[0], results(others, ids)[0])


def test_another_dtype_than_that_of_the_weight_is_left_to_transformers() -> None:
    made, config, _ = KINDS["qwen3_moe"]
    norm = made._from_config(config, dtype=torch.float32).model.norm
    x = torch.randn(3, 48).bfloat16()
    want = norm(x)
    assert fuse_norms(norm) == 1
    assert torch.equal(norm(x), want) and norm(x).dtype == torch.float32
    halves = copy.deepcopy(norm).bfloat16()
    torch.testing.assert_close(halves(x).float(), want, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_without_values_yet_are_known_too(kind: str) -> None:
    made, config, count = KINDS[kind]
    with torch.device("meta"):
        model = made(config)
    assert fuse_norms(model) == count
