"""Model files against the published configurations, stated in the words of their config.json."""

import pytest

from phalanx.configs.linear_attention import HEAD_DIM, TAPS, is_linear
from phalanx.configs.load import load
from phalanx.configs.schema import ModelConfig

DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 10000,
    "rope_factor": 40,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
GPT_OSS_20B = {
    "vocab_size": 201088,
    "num_hidden_layers": 24,
    "hidden_size": 2880,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": ["sliding", "full"] * 12,
    "rope_theta": 150000,
    "rope_factor": 32,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": False,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2880,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
PUBLISHED = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v3_l4": DEEPSEEK_V3
    | {"num_hidden_layers": 4, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    "gpt_oss_20b": GPT_OSS_20B,
    "gpt_oss_120b": GPT_OSS_20B
    | {"num_hidden_layers": 36, "n_routed_experts": 128, "layer_types": ["sliding", "full"] * 18},
    "qwen3_30b_a3b": {
        "vocab_size": 151936,
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "attention_bias": False,
        "layer_types": ["full"] * 48,
        "rope_theta": 1000000,
        "rope_factor": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "scoring_func": "softmax",
        "router_aux_loss_coef": 1e-3,
        "tie_word_embeddings": False,
    },
    "moonlight_16b_a3b": {
        "vocab_size": 163840,
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 50000,
        "rope_factor": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "num_nextn_predict_layers": 0,
    },
}

MIXTRAL = {
    "vocab_size": 32000,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "layer_types": ["full"] * 32,
    "rope_theta": 1000000,
    "rope_factor": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 14336,
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "scoring_func": "softmax",
    "router_aux_loss_coef": 0.02,
    "tie_word_embeddings": False,
}
GLM_4_5 = {
    "vocab_size": 151552,
    "num_hidden_layers": 92,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,  # of the output projection; those of the others are told apart
    "qkv_bias": True,
    "use_qk_norm": "head",
    "rope_theta": 1000000,
    "rope_factor": 1,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}
PUBLISHED |= {
    "qwen3_235b_a22b": PUBLISHED["qwen3_30b_a3b"]
    | {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 64,
        "layer_types": ["full"] * 94,
        "moe_intermediate_size": 1536,
        "use_qk_norm": "head",
    },
    "mixtral_8x7b": MIXTRAL,
    "mixtral_8x22b": MIXTRAL
    | {
        "num_hidden_layers": 56,
        "hidden_size": 6144,
        "num_attention_heads": 48,
        "layer_types": ["full"] * 56,
        "moe_intermediate_size": 16384,
        "router_aux_loss_coef": 0.001,
    },
    "deepseek_v2_lite": {
        "vocab_size": 102400,
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_theta": 10000,
        "rope_factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    },
    "kimi_k2": DEEPSEEK_V3
    | {
        "vocab_size": 163840,
        "num_attention_heads": 64,
        "rope_theta": 50000,
        "rope_factor": 32,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "n_routed_experts": 384,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
    },
    "olmoe_1b_7b": {
        "vocab_size": 50304,
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "attention_bias": False,
        "qkv_bias": False,
        "use_qk_norm": "projection",
        "rope_theta": 10000,
        "rope_factor": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "n_shared_experts": 0,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
    },
    "glm_4_5": GLM_4_5,
    "glm_4_5_air": GLM_4_5
    | {
        "num_hidden_layers": 46,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "use_qk_norm": None,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
    },
    "minimax_m2": {
        "vocab_size": 200064,
        "num_hidden_layers": 62,
        "hidden_size": 3072,
        "rms_norm_eps": 1e-6,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "qkv_bias": False,
        "use_qk_norm": "projection",
        "rope_theta": 5000000,
        "rope_factor": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.001,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
    },
}


PUBLISHED["qwen3_next_80b_a3b"] = {
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "rms_norm_eps": 1e-6,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "qkv_bias": False,
    "use_qk_norm": "head",
    "layer_types": (["linear"] * 3 + ["full"]) * 12,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_theta": 10000000,
    "rope_factor": 1,
    "n_routed_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "first_k_dense_replace": 0,
    "scoring_func": "softmax",
    "norm_topk_prob": True,
    "router_aux_loss_coef": 1e-3,
    "tie_word_embeddings": False,
}


def published_words(m: ModelConfig) -> dict[str, object]:
    """Our configuration in the words of config.json."""
    a, e, r = m.attention, m.moe, m.moe.router
    full = [not a.window or (i + 1) % a.window_every == 0 for i in range(m.layers)]
    kinds = ["full" if x else "sliding" for x in full]
    state = m.linear_attention
    return {
        "vocab_size": m.vocab_size,
        "num_hidden_layers": m.layers,
        "hidden_size": m.hidden,
        "intermediate_size": m.dense_ffn,
        "rms_norm_eps": m.norm_eps,
        "tie_word_embeddings": m.tie_embeddings,
        "num_nextn_predict_layers": m.mtp_layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "partial_rotary_factor": (a.rotary_dim or a.head_dim) / a.head_dim,
        "attention_bias": m.bias,
        "qkv_bias": a.qkv_bias,
        "use_qk_norm": a.qk_norm_over if a.qk_norm else None,
        "q_lora_rank": a.q_lora_rank or None,
        "kv_lora_rank": a.kv_lora_rank,
        "qk_nope_head_dim": a.qk_nope_dim,
        "qk_rope_head_dim": a.qk_rope_dim,
        "v_head_dim": a.v_dim,
        "sliding_window": a.window,
        "layer_types": ["linear" if is_linear(m, i) else kinds[i] for i in range(m.layers)],
        "linear_num_key_heads": state.key_heads,
        "linear_num_value_heads": state.value_heads,
        "linear_key_head_dim": HEAD_DIM,
        "linear_value_head_dim": HEAD_DIM,
        "linear_conv_kernel_dim": TAPS,
        "rope_theta": a.rope_theta,
        "rope_factor": a.yarn.factor,
        "original_max_position_embeddings": a.yarn.original_context,
        "beta_fast": a.yarn.beta_fast,
        "beta_slow": a.yarn.beta_slow,
        "mscale": a.yarn.mscale,
        "mscale_all_dim": a.yarn.mscale_all_dim,
        "truncate": a.yarn.truncate,
        "n_routed_experts": e.experts,
        "num_experts_per_tok": e.top_k,
        "moe_intermediate_size": e.ffn,
        "n_shared_experts": e.shared_ffn // e.ffn,
        "shared_expert_intermediate_size": e.shared_ffn,
        "first_k_dense_replace": e.dense_layers,
        "swiglu_limit": e.activation_limit,
        "scoring_func": r.score,
        "norm_topk_prob": r.normalize,
        "n_group": r.groups,
        "topk_group": r.group_topk,
        "routed_scaling_factor": r.scale,
        "router_aux_loss_coef": r.aux_loss,
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_equals_its_publication(name: str) -> None:
    ours = published_words(load([f"model={name}"]).model)
    assert {key: ours[key] for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", ["gpt_oss_20b", "gpt_oss_120b"])
def test_gpt_oss_activation_and_routing(name: str) -> None:
    m = load([f"model={name}"]).model
    e = m.moe
    assert (e.activation, e.activation_alpha, e.activation_offset) == ("quick_geglu", 1.702, 1.0)
    assert (e.router.score, e.router.softmax_over) == ("softmax", "topk")
    assert m.attention.sinks


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3_l4", "moonlight_16b_a3b"])
def test_deepseek_balancing(name: str) -> None:
    r = load([f"model={name}"]).model.moe.router
    assert r.bias_rate == 1e-3
    assert (r.aux_loss, r.global_aux_loss, r.z_loss) == (0, 0, 0)
    assert r.seq_aux_loss == (1e-3 if name == "moonlight_16b_a3b" else 1e-4)


def test_qwen3_normalises_query_and_key_heads() -> None:
    assert load(["model=qwen3_30b_a3b"]).model.attention.qk_norm


def test_tiny_deepseek_has_every_part_of_deepseek_v3() -> None:
    small, large = (load([f"model={name}"]).model for name in ("tiny_deepseek", "deepseek_v3"))
    for m in (small, large):
        a, e, r = m.attention, m.moe, m.moe.router
        assert (a.kind, r.score, r.normalize) == ("mla", "sigmoid", True)
        assert min(a.q_lora_rank, m.mtp_layers, e.shared_ffn, e.dense_layers) > 0
        assert min(a.yarn.factor, r.groups, r.scale) > 1
        assert r.bias_rate and r.seq_aux_loss and r.group_topk < r.groups


def test_tiny_gpt_oss_has_every_part_of_gpt_oss() -> None:
    small, large = (load([f"model={name}"]).model for name in ("tiny_gpt_oss", "gpt_oss_20b"))
    for m in (small, large):
        a, e = m.attention, m.moe
        assert (a.kind, a.sinks, a.window_every, a.yarn.truncate) == ("gqa", True, 2, False)
        assert a.window and a.kv_heads < a.heads and a.yarn.factor > 1 and m.bias
        assert (e.activation, e.activation_limit, e.activation_offset) == ("quick_geglu", 7.0, 1.0)
        assert e.router.softmax_over == "topk"


def test_tiny_qwen3_next_has_every_part_of_qwen3_next() -> None:
    small, large = (
        load([f"model={name}"]).model for name in ("tiny_qwen3_next", "qwen3_next_80b_a3b")
    )
    for m in (small, large):
        a, e, state = m.attention, m.moe, m.linear_attention
        assert (a.kind, a.output_gate, a.qk_norm, m.norm_zero_centered) == ("gqa", True, True, True)
        assert 0 < a.rotary_dim < a.head_dim and a.kv_heads < a.heads
        assert e.shared_gate and e.shared_ffn and m.mtp_layers
        assert state.full_attention_interval == 4 and state.key_heads < state.value_heads
        assert m.layers % 4 == 0
