"""What the architectures of Hugging Face fix, and which field of a config.json is which knob.

Knobs are named by their path below `model.`. What a family fixes is set by an import and required
of an export, so that no difference between two architectures is passed over.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One architecture."""

    architecture: str
    """Its class in transformers."""
    fixed: dict[str, Any]
    """Knob -> value that the architecture leaves no choice of."""
    fields: dict[str, str]
    """Field -> knob of the same value."""
    demanded: dict[str, Any]
    """Field -> the one value that it can have; also what it means where it is absent."""
    harmless: frozenset[str] = field(default_factory=frozenset)
    """Fields that change no result, besides those of all families."""


HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "initializer_range",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Fields of any family that name things, or steer what a caller gets, not what a model computes."""

_SWIGLU = {"moe.activation": "swiglu", "moe.activation_limit": 0.0, "moe.activation_offset": 0.0}
_GROUPED = {"attention.kind": "gqa", "mtp_layers": 0, "moe.shared_ffn": 0}
_PLAIN_CHOICE = {"moe.router.groups": 1, "moe.router.scale": 1.0, "moe.router.bias_rate": 0.0}
_COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "num_attention_heads": "attention.heads",
    "num_experts_per_tok": "moe.top_k",
}
_ALL = {"attention_dropout": 0.0, "hidden_act": "silu"}

FAMILIES = {
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        fixed={
            **_SWIGLU,
            "bias": False,
            "attention.kind": "mla",
            "attention.yarn.truncate": True,
            "moe.router.score": "sigmoid",
        },
        fields={
            **_COMMON,
            "intermediate_size": "dense_ffn",
            "kv_lora_rank": "attention.kv_lora_rank",
            "qk_nope_head_dim": "attention.qk_nope_dim",
            "qk_rope_head_dim": "attention.qk_rope_dim",
            "v_head_dim": "attention.v_dim",
            "n_routed_experts": "moe.experts",
            "moe_intermediate_size": "moe.ffn",
            "first_k_dense_replace": "moe.dense_layers",
            "norm_topk_prob": "moe.router.normalize",
            "n_group": "moe.router.groups",
            "topk_group": "moe.router.group_topk",
            "routed_scaling_factor": "moe.router.scale",
        },
        demanded={
            **_ALL,
            "attention_bias": False,
            "moe_layer_freq": 1,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        harmless=frozenset({"ep_size", "pretraining_tp"}),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        fixed={
            **_SWIGLU,
            **_GROUPED,
            **_PLAIN_CHOICE,
            "bias": False,
            "attention.qk_norm": True,
            "attention.sinks": False,
            "attention.window": 0,
            "moe.router.score": "softmax",
            "moe.router.softmax_over": "all",
        },
        fields={
            **_COMMON,
            "intermediate_size": "dense_ffn",
            "num_key_value_heads": "attention.kv_heads",
            "head_dim": "attention.head_dim",
            "num_experts": "moe.experts",
            "moe_intermediate_size": "moe.ffn",
            "norm_topk_prob": "moe.router.normalize",
        },
        demanded={
            **_ALL,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "use_sliding_window": False,
        },
        # Windows are read only with use_sliding_window.
        harmless=frozenset({"max_window_layers", "sliding_window"}),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        fixed={
            **_GROUPED,
            **_PLAIN_CHOICE,
            "bias": True,
            "attention.qk_norm": False,
            "attention.sinks": True,
            "moe.dense_layers": 0,
            "moe.activation": "quick_geglu",
            "moe.activation_offset": 1.0,
            "moe.router.score": "softmax",
            "moe.router.softmax_over": "topk",
        },
        fields={
            **_COMMON,
            "num_key_value_heads": "attention.kv_heads",
            "head_dim": "attention.head_dim",
            "num_local_experts": "moe.experts",
            "intermediate_size": "moe.ffn",
            "swiglu_alpha": "moe.activation_alpha",
            "swiglu_limit": "moe.activation_limit",
        },
        demanded={**_ALL, "attention_bias": True},
    ),
}
"""By `model_type`."""
