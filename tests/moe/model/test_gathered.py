"""Weights of modules whose forward is passed by are waited for."""

from typing import Any

import torch

from tests.moe.model.test_attention import config, install
from tests.support.distributed import run_distributed


def _norms() -> None:
    install()
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules

    from phalanx.moe.model.attention import core_attention
    from phalanx.moe.model.grouped_attention import GroupedAttention
    from phalanx.moe.model.norm import RMSNorm
    from phalanx.parallel.groups import create

    c = config(qk_layernorm=True, transformer_impl="local", num_layers=1)
    sub = get_gpt_layer_local_submodules(qk_layernorm=True).self_attention.submodules
    sub.core_attention, sub.q_layernorm, sub.k_layernorm = (
        core_attention("reference"),
        RMSNorm,
        RMSNorm,
    )
    block = GroupedAttention(c, sub, layer_number=1, pg_collection=create().pg)
    for p in block.parameters():
        torch.nn.init.ones_(p)
    freqs = torch.zeros(4, 1, 1, 8)
    arrived = []

    def arrive(module: Any, inputs: Any) -> None:
        arrived.append(module)
        torch.nn.init.constant_(module.weight, 0.5)

    with torch.no_grad():
        # The same output as with weights that were there from the start.
        for norm in (block.q_layernorm, block.k_layernorm):
            norm.weight.fill_(0.5)
        x = torch.randn(4, 1, 32)
        want, _ = block(x, None, rotary_pos_emb=freqs)
        for norm in (block.q_layernorm, block.k_layernorm):
            norm.weight.fill_(7.0)
            norm.register_forward_pre_hook(arrive)
        got, _ = block(x, None, rotary_pos_emb=freqs)
    assert arrived == [block.q_layernorm, block.k_layernorm]
    assert torch.equal(got, want)


def test_norms_of_heads() -> None:
    run_distributed(_norms, 1)
