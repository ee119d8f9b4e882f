"""Parameters and FLOPs of sparse attention against a count of tensors and of pairs."""

import pytest
import torch

from phalanx.configs.arithmetic.accounting import flops_per_token, parameters
from phalanx.configs.load import load


@pytest.mark.parametrize(("name", "kind"), [("deepseek_v32", "V32"), ("glm_5", "Glm")])
def test_parameters_are_those_of_transformers(name: str, kind: str) -> None:
    """Published sizes, with a dense layer and one with few experts."""
    import transformers

    more = ["model.moe.dense_layers=1", "model.layers=2", "model.moe.experts=8"]
    model = load([f"model={name}", *more, "model.moe.router.groups=1"]).model
    config = {"V32": transformers.DeepseekV32Config, "Glm": transformers.GlmMoeDsaConfig}[kind](
        num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8
    )
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    exact = sum(p.numel() for p in theirs.parameters())
    assert parameters(model, mtp=False).total == exact


@pytest.mark.parametrize("length", [40, 64, 200])
@pytest.mark.parametrize("phase", ["sparse", "warm_up"])
def test_flops_of_pairs(length: int, phase: str) -> None:
    words = ["model=tiny_deepseek", "model.mtp_layers=0"]
    knob = [f"model.attention.sparse={{heads:3,dim:16,top_k:64,phase:{phase}}}"]
    sparse, without = (flops_per_token(load([*words, *knob]).model, n) for n in (length, 0))
    m = load(words).model
    seen = sum(min(i + 1, 64) if phase == "sparse" else i + 0.5 for i in range(length)) / length
    if phase == "sparse" and length <= 64:
        seen = length / 2
    channels = m.attention.heads * (m.attention.qk_nope_dim + m.attention.qk_rope_dim)
    channels += m.attention.heads * m.attention.v_dim
    scores = 3 * 16 * length / 2 * (2 if phase == "sparse" else 6)
    assert sparse - without == pytest.approx(m.layers * (6 * channels * seen + scores), rel=0.01)
