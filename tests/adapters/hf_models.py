"""Tiny models of transformers with experts."""

import copy
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 62
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=40,
    max_position_embeddings=64,
    num_experts_per_tok=2,
)
MODELS: dict[str, tuple[Any, Any]] = {
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**_COMMON, head_dim=12, moe_intermediate_size=40, num_experts=7),
    ),
    "qwen3_moe, even": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**_COMMON, head_dim=12, moe_intermediate_size=40, num_experts=8),
    ),
    "mixtral, top-1": (
        MixtralForCausalLM,
        MixtralConfig(**_COMMON | {"num_experts_per_tok": 1}, num_local_experts=5),
    ),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **_COMMON, head_dim=12, num_local_experts=5, layer_types=["full_attention"] * 2
        ),
    ),
    "gpt_oss, even": (
        GptOssForCausalLM,
        GptOssConfig(
            **_COMMON, head_dim=12, num_local_experts=6, layer_types=["full_attention"] * 2
        ),
    ),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(
            **_COMMON | {"num_key_value_heads": 4},
            moe_intermediate_size=40,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
    ),
}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal in fp32, but for the order of sums."""
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-6 * (1 + want.abs().max().item()))


def model(name: str, implementation: str, layers: int = 2) -> Any:
    """A model in fp32, with weights that do not depend on the implementation of its experts."""
    model_class, config = MODELS[name]
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    torch.manual_seed(0)
    made = model_class._from_config(config, experts_implementation=implementation).train()
    generator = torch.Generator().manual_seed(1)
    state = made.state_dict()  # in transformers' layout
    for key, value in state.items():
        if "expert" in key:
            state[key] = torch.randn(value.shape, generator=generator) * 0.1
    made.load_state_dict(state)
    return made


def tokens(seed: int = 2) -> torch.Tensor:
    """[3, 11] ids."""
    return torch.randint(0, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(seed))
