"""Attention modules with our rotary embedding against Megatron-Core's own, bit for bit on a CPU."""

from typing import Any

import pytest
import torch

from tests.support.distributed import run_distributed

SEQUENCE, BATCH = 12, 2


def _compare(kind: str, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    from phalanx.parallel.megatron.cpu import install

    install()
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from phalanx.moe.model.attention import LatentAttention, core_attention
    from phalanx.moe.model.grouped_attention import GroupedAttention
    from phalanx.moe.model.megatron_config import _YarnConfig
    from phalanx.moe.model.norm import RMSNorm
    from phalanx.parallel.groups import create

    pg = create().pg
    mla = kind == "mla"
    shape: dict[str, Any] = dict(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=not mla,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        transformer_impl="local",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    if mla:
        latent = dict(kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=4)
        shape |= dict(q_lora_rank=16, qk_layernorm=True, **latent)
    else:
        shape |= dict(num_query_groups=2, kv_channels=8)
    c = (MLATransformerConfig if mla else _YarnConfig)(**shape | changes)
    spec = get_gpt_layer_local_submodules(qk_layernorm=c.qk_layernorm, multi_latent_attention=mla)
    sub = spec.self_attention.submodules
    sub.core_attention = core_attention("reference")
    for name in ("q_layernorm", "k_layernorm", "kv_layernorm"):
        if c.qk_layernorm and hasattr(sub, name):
            setattr(sub, name, RMSNorm)
    stock, ours = (MLASelfAttention, LatentAttention) if mla else (SelfAttention, GroupedAttention)
    blocks = [kind(c, sub, layer_number=1, pg_collection=pg) for kind in (stock, ours)]
    generator = torch.Generator().manual_seed(0)
    for p in blocks[0].parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    blocks[1].load_state_dict(blocks[0].state_dict(), strict=True)
    freqs = {} if mla else {"rotary_pos_emb": RotaryEmbedding(8, 1.0)(SEQUENCE)}
    x, upstream = (torch.randn(SEQUENCE, BATCH, 32, generator=generator).to(dtype) for _ in "xu")
    results = []
    for block in blocks:
        leaf = x.clone().requires_grad_()
        out, _ = block(leaf, None, **freqs)
        out.backward(upstream)
        grads = {name: p.grad for name, p in block.named_parameters()}
        results.append({"out": out.detach(), "x": leaf.grad} | grads)
    assert results[0]["x"].abs().sum() > 0
    for name, expected in results[0].items():
        if expected is None:  # the output bias, which the layer adds
            assert results[1][name] is None
        else:
            assert torch.equal(results[1][name], expected), name


YARN = dict(yarn_rotary_scaling_factor=32.0, yarn_mscale=1.0, yarn_mscale_all_dim=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gqa", {}),
        ("gqa", YARN),
        ("gqa", {"qk_layernorm": True}),
        ("mla", {"rope_type": "rope"}),
        ("mla", {"rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale_all_dim": 0.5}),
    ],
    ids=["grouped", "yarn", "norms", "latent", "latent yarn"],
)
def test_equals_megatron(kind: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    run_distributed(_compare, 1, kind, dtype, changes)
