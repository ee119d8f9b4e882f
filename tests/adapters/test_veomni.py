"""The experts in VeOmni's generated models, against its eager implementation."""

from dataclasses import fields
from typing import Any

import pytest
import torch

pytest.importorskip("veomni")

import phalanx.adapters.veomni


def test_experts_of_a_model() -> None:
    from transformers import Qwen3MoeConfig
    from veomni.arguments import OpsImplementationConfig
    from veomni.models import auto
    from veomni.models.transformers.qwen3_moe.generated import (
        patched_modeling_qwen3_moe_gpu as modeling,
    )

    config = Qwen3MoeConfig(hidden_size=24, num_experts=5, moe_intermediate_size=20)
    experts = modeling.Qwen3MoeExperts(config)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0, 0.3)
    x, prob = torch.randn(17, 24).requires_grad_(), torch.rand(17, 2).requires_grad_()
    idx = torch.rand(17, 4).argsort(-1)[:, :2]
    leaves = [x, prob, *experts.parameters()]
    results: list[Any] = []
    for name in ("eager", "fused_phalanx"):
        names = [f.name for f in fields(OpsImplementationConfig)]
        eager = {n: "eager" for n in names if n.endswith("_implementation")}
        chosen = {"moe_implementation": name, "qat_implementation": "none"}
        options = OpsImplementationConfig(**eager | chosen)
        auto._bind_veomni_ops(modeling, options)
        assert modeling.veomni_moe_experts_forward.use_non_eager_impl == (name != "eager")
        out = experts(x, idx, prob)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_another_activation_is_refused_by_name() -> None:
    class Experts(torch.nn.Module):
        act_fn = torch.nn.GELU()

    with pytest.raises(ValueError, match="^Experts: moe_implementation=fused_phalanx"):
        phalanx.adapters.veomni.forward(Experts(), *[torch.zeros(1, 1)] * 3)
