"""Architectures of Hugging Face: the knobs that they fix, and the fields of config.json per knob.

Knobs are named by their path below `model.`. Fixed knobs are set by an import and required of an
export, so that no difference between two architectures is ignored.
"""

from dataclasses import dataclass, field
from typing import Any

from phalanx.configs.arithmetic.layers import has_experts, mixer_layers
from phalanx.configs.schema import ModelConfig


@dataclass(frozen=True)
class Names:
    """Names of the tensors of an MoE layer, below `model.layers.<n>.`."""

    block: str = "mlp"
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"  # of the router, if it has one
    matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Matrices of one expert; none if all experts are in one tensor."""
    shared: str = "shared_experts"
    prediction: str = ""  # prefix; empty if numbered after the decoder's layers


@dataclass(frozen=True)
class Family:
    """One architecture."""

    architecture: str  # class in transformers
    fixed: dict[str, Any]  # knob -> value of the architecture
    fields: dict[str, str]  # field -> knob of the same value
    demanded: dict[str, Any]  # field -> its only supported value, also its default
    harmless: frozenset[str] = field(default_factory=frozenset)  # further fields without effect
    names: Names = Names()
    partial_rotary: float | None = None
    """Default fraction of a head that is rotated; None for families that rotate all of it."""


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

_SWIGLU = {"moe.activation": "swiglu", "moe.activation_limit": 0.0, "moe.activation_offset": 0.0}
_PLAIN_HEADS = {
    "attention.kind": "gqa",
    "attention.qk_norm_over": "head",
    "attention.qkv_bias": False,
    "attention.rotary_dim": 0,
}
_LATENT_HEADS = {
    "attention.kind": "mla",
    "attention.qk_norm": False,
    "attention.qk_norm_over": "head",
    "attention.qkv_bias": False,
    "attention.rotary_dim": 0,
    "attention.sinks": False,
    "attention.window": 0,
    "attention.yarn.truncate": True,
}
_PLAIN = {
    "norm_zero_centered": False,
    "attention.output_gate": False,
    "attention.sparse": {},
    "linear_attention.full_attention_interval": 1,
    "moe.shared_gate": False,
}
_INDEXED = {  # latent attention with an indexer; `attention.sparse` is read field by field
    **_SWIGLU,
    **{knob: value for knob, value in _PLAIN.items() if knob != "attention.sparse"},
    **_LATENT_HEADS,
    "bias": False,
    "moe.router.score": "sigmoid",
}
_NORMED_TOGETHER = {"attention.qk_norm": True, "attention.qk_norm_over": "projection"}
_ROUTED_ONLY = {"mtp_layers": 0, "moe.shared_ffn": 0}
_PLAIN_CHOICE = {"moe.router.groups": 1, "moe.router.scale": 1.0, "moe.router.bias_rate": 0.0}
_COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "num_attention_heads": "attention.heads",
}
_TOP_K = {"num_experts_per_tok": "moe.top_k"}
_LATENT = {
    **_COMMON,
    **_TOP_K,
    "intermediate_size": "dense_ffn",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_nope_head_dim": "attention.qk_nope_dim",
    "qk_rope_head_dim": "attention.qk_rope_dim",
    "v_head_dim": "attention.v_dim",
    "n_routed_experts": "moe.experts",
    "moe_intermediate_size": "moe.ffn",
    "first_k_dense_replace": "moe.dense_layers",
    "routed_scaling_factor": "moe.router.scale",
}
_HEADS = {"num_key_value_heads": "attention.kv_heads", "head_dim": "attention.head_dim"}
_GROUPED = {**_COMMON, **_TOP_K, **_HEADS}
_DENSE = {**_COMMON, **_HEADS, "intermediate_size": "dense_ffn"}
_NO_EXPERTS = {
    **{"mtp_layers": 0, "bias": False, "moe.experts": 0, "moe.shared_ffn": 0},
    **{f"moe.router.{name}": 0.0 for name in ("aux_loss", "seq_aux_loss", "global_aux_loss")},
    **{"moe.router.z_loss": 0.0, "moe.router.bias_rate": 0.0},
}
_DENSE_LAYERS = {
    **_SWIGLU,
    **_PLAIN,
    **_PLAIN_HEADS,
    **_NO_EXPERTS,
    "attention.sinks": False,
    "attention.window": 0,
}
_ALL = {"attention_dropout": 0.0, "hidden_act": "silu"}
_V3_FIELDS = {
    **_LATENT,
    "norm_topk_prob": "moe.router.normalize",
    "n_group": "moe.router.groups",
    "topk_group": "moe.router.group_topk",
}
_V3_DEMANDED = {
    **_ALL,
    "attention_bias": False,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_MIXTRAL_NAMES = Names(
    block="block_sparse_moe",
    choice_bias="e_score_correction_bias",
    matrices=("w1", "w3", "w2"),
)

FAMILIES = {
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        fixed={
            **_SWIGLU,
            **_PLAIN,
            **_LATENT_HEADS,
            "bias": False,
            "moe.router.score": "sigmoid",
        },
        fields=_V3_FIELDS,
        demanded=_V3_DEMANDED,
        harmless=frozenset({"ep_size", "pretraining_tp"}),
    ),
    "deepseek_v32": Family(
        architecture="DeepseekV32ForCausalLM",
        fixed=_INDEXED,
        fields=_V3_FIELDS,
        demanded={**_V3_DEMANDED, "mlp_bias": False},
        harmless=frozenset({"ep_size", "pretraining_tp"}),
    ),
    "glm_moe_dsa": Family(
        architecture="GlmMoeDsaForCausalLM",
        fixed=_INDEXED,
        fields=_V3_FIELDS,
        demanded={**_V3_DEMANDED, "mlp_bias": False, "indexer_rope_interleave": True},
        harmless=frozenset({"ep_size", "moe_router_dtype", "pretraining_tp"}),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        fixed={
            **_SWIGLU,
            **_PLAIN,
            **_PLAIN_HEADS,
            **_ROUTED_ONLY,
            **_PLAIN_CHOICE,
            "bias": False,
            "attention.qk_norm": True,
            "attention.sinks": False,
            "attention.window": 0,
            "moe.router.score": "softmax",
            "moe.router.softmax_over": "all",
        },
        fields={
            **_GROUPED,
            "intermediate_size": "dense_ffn",
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
            **_PLAIN,
            **_PLAIN_HEADS,
            **_ROUTED_ONLY,
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
            **_GROUPED,
            "num_local_experts": "moe.experts",
            "intermediate_size": "moe.ffn",
            "swiglu_alpha": "moe.activation_alpha",
            "swiglu_limit": "moe.activation_limit",
        },
        demanded={**_ALL, "attention_bias": True},
        names=Names(router="router", matrices=()),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        fixed={
            **_SWIGLU,
            **_PLAIN,
            **_PLAIN_HEADS,
            **_ROUTED_ONLY,
            **_PLAIN_CHOICE,
            "bias": False,
            "attention.qk_norm": False,
            "attention.sinks": False,
            "attention.window_every": 1,
            "moe.dense_layers": 0,
            "moe.router.score": "softmax",
            "moe.router.softmax_over": "topk",
        },
        fields={**_GROUPED, "num_local_experts": "moe.experts", "intermediate_size": "moe.ffn"},
        demanded={**_ALL, "router_jitter_noise": 0.0},
        names=_MIXTRAL_NAMES,
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        fixed={
            **_SWIGLU,
            **_PLAIN,
            **_LATENT_HEADS,
            "bias": False,
            "mtp_layers": 0,
            "moe.router.bias_rate": 0.0,
            "moe.router.groups": 1,
            "moe.router.group_topk": 1,
            "moe.router.score": "softmax",
            "moe.router.softmax_over": "all",
            "moe.router.normalize": False,
        },
        fields=_LATENT,
        demanded={
            **_ALL,
            "attention_bias": False,
            "mlp_bias": False,
            "moe_layer_freq": 1,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_method": "greedy",
        },
        # Groups are read only by other methods of choosing than the greedy one.
        harmless=frozenset({"ep_size", "n_group", "pretraining_tp", "topk_group"}),
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        fixed={
            **_SWIGLU,
            **_PLAIN,
            **_PLAIN_HEADS,
            **_NORMED_TOGETHER,
            **_ROUTED_ONLY,
            **_PLAIN_CHOICE,
            "bias": False,
            "attention.sinks": False,
            "attention.window": 0,
            "moe.dense_layers": 0,
            "moe.router.score": "softmax",
            "moe.router.softmax_over": "all",
        },
        fields={
            **_GROUPED,
            "num_experts": "moe.experts",
            "intermediate_size": "moe.ffn",
            "norm_topk_prob": "moe.router.normalize",
        },
        demanded={**_ALL, "attention_bias": False, "clip_qkv": None},
    ),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        fixed={
            **_SWIGLU,
            **_PLAIN,
            "bias": False,
            "attention.kind": "gqa",
            "attention.qk_norm_over": "head",
            "attention.sinks": False,
            "attention.window": 0,
            "moe.router.score": "sigmoid",
        },
        fields={
            **_GROUPED,
            "attention_bias": "attention.qkv_bias",
            "use_qk_norm": "attention.qk_norm",
            "intermediate_size": "dense_ffn",
            "n_routed_experts": "moe.experts",
            "moe_intermediate_size": "moe.ffn",
            "first_k_dense_replace": "moe.dense_layers",
            "norm_topk_prob": "moe.router.normalize",
            "n_group": "moe.router.groups",
            "topk_group": "moe.router.group_topk",
            "routed_scaling_factor": "moe.router.scale",
        },
        demanded=_ALL,
        partial_rotary=0.5,
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        fixed={
            **_SWIGLU,
            **_PLAIN,
            **_NORMED_TOGETHER,
            **_ROUTED_ONLY,
            "bias": False,
            "attention.kind": "gqa",
            "attention.qkv_bias": False,
            "attention.sinks": False,
            "attention.window": 0,
            "moe.dense_layers": 0,
            "moe.router.score": "sigmoid",
            "moe.router.normalize": True,
            "moe.router.groups": 1,
            "moe.router.group_topk": 1,
            "moe.router.scale": 1.0,
        },
        fields={**_GROUPED, "num_local_experts": "moe.experts", "intermediate_size": "moe.ffn"},
        demanded={
            **_ALL,
            "qk_norm_type": "per_layer",
            "router_jitter_noise": 0.0,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "sliding_window": None,
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
        # Fields of a dense MLP and of prediction layers, which the published weights lack.
        harmless=frozenset(
            {"mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"}
        ),
        names=_MIXTRAL_NAMES,
        partial_rotary=1.0,
    ),
    "qwen3_next": Family(
        architecture="Qwen3NextForCausalLM",
        fixed={
            **_SWIGLU,
            **_PLAIN_CHOICE,
            "bias": False,
            "norm_zero_centered": True,
            "attention.kind": "gqa",
            "attention.qk_norm": True,
            "attention.qk_norm_over": "head",
            "attention.qkv_bias": False,
            "attention.output_gate": True,
            "attention.sinks": False,
            "attention.window": 0,
            "moe.dense_layers": 0,
            "moe.shared_gate": True,
            "moe.router.score": "softmax",
            "moe.router.softmax_over": "all",
        },
        fields={
            **_GROUPED,
            "intermediate_size": "dense_ffn",
            "linear_num_key_heads": "linear_attention.key_heads",
            "linear_num_value_heads": "linear_attention.value_heads",
            "num_experts": "moe.experts",
            "moe_intermediate_size": "moe.ffn",
            "shared_expert_intermediate_size": "moe.shared_ffn",
            "norm_topk_prob": "moe.router.normalize",
        },
        demanded={
            **_ALL,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "use_sliding_window": False,
        },
        names=Names(shared="shared_expert", prediction="mtp."),
        partial_rotary=0.25,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        fixed={**_DENSE_LAYERS, "attention.qk_norm": True},
        fields=_DENSE,
        demanded={**_ALL, "attention_bias": False, "use_sliding_window": False},
        # Windows are read only with use_sliding_window.
        harmless=frozenset({"max_window_layers", "sliding_window"}),
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        fixed={**_DENSE_LAYERS, "attention.qk_norm": False},
        fields=_DENSE,
        demanded={**_ALL, "attention_bias": False, "mlp_bias": False},
        harmless=frozenset({"pretraining_tp"}),
    ),
}

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Further `model_type` names of a family, with the same fields and tensors."""


def family_of(m: ModelConfig) -> str:
    """The only possible family of a model; its other fixed knobs are not checked."""
    a, sigmoid = m.attention, m.moe.router.score == "sigmoid"
    if not has_experts(m):
        return "qwen3" if a.qk_norm else "llama"
    if a.sparse:
        return "glm_moe_dsa" if a.sparse.get("interleaved") else "deepseek_v32"
    if len(mixer_layers(m)) > 1 or a.output_gate:
        return "qwen3_next"
    if a.kind == "mla":
        return "deepseek_v3" if sigmoid else "deepseek_v2"
    if a.sinks or m.moe.activation == "quick_geglu":
        return "gpt_oss"
    if a.qk_norm and a.qk_norm_over == "projection":
        return "minimax_m2" if sigmoid else "olmoe"
    if sigmoid:
        return "glm4_moe"
    return "qwen3_moe" if a.qk_norm else "mixtral"
