"""config.json of Hugging Face and the model section of a configuration, each from the other.

Knobs are named by their path below `model.`. What a family fixes is set by an import and required
of an export, so that no difference between two architectures is passed over.
"""

from typing import Any

from configs.knobs import get, knobs, written
from configs.schema import Config, ModelConfig
from moe.hf import ConversionError
from moe.hf.fields import number, value_of
from moe.hf.rope import from_rope, to_rope_scaling

_SWIGLU = {"moe.activation": "swiglu", "moe.activation_limit": 0.0, "moe.activation_offset": 0.0}
_GROUPED = {"attention.kind": "gqa", "mtp_layers": 0, "moe.shared_ffn": 0}
_PLAIN_CHOICE = {"moe.router.groups": 1, "moe.router.scale": 1.0, "moe.router.bias_rate": 0.0}

_FIXED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_SWIGLU,
        "bias": False,
        "attention.kind": "mla",
        "attention.yarn.truncate": True,
        "moe.router.score": "sigmoid",
    },
    "qwen3_moe": {
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
    "gpt_oss": {
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
}
"""Family -> knobs that its architecture leaves no choice of."""

_COMMON = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "num_attention_heads": "attention.heads",
    "num_experts_per_tok": "moe.top_k",
}
_FIELDS: dict[str, dict[str, str]] = {
    "deepseek_v3": {
        **_COMMON,
        "intermediate_size": "dense_ffn",
        "q_lora_rank": "attention.q_lora_rank",
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
    "qwen3_moe": {
        **_COMMON,
        "intermediate_size": "dense_ffn",
        "num_key_value_heads": "attention.kv_heads",
        "head_dim": "attention.head_dim",
        "num_experts": "moe.experts",
        "moe_intermediate_size": "moe.ffn",
        "norm_topk_prob": "moe.router.normalize",
    },
    "gpt_oss": {
        **_COMMON,
        "num_key_value_heads": "attention.kv_heads",
        "head_dim": "attention.head_dim",
        "num_local_experts": "moe.experts",
        "intermediate_size": "moe.ffn",
        "swiglu_alpha": "moe.activation_alpha",
        "swiglu_limit": "moe.activation_limit",
    },
}
"""Family -> field of config.json -> knob of the same value."""

_DEMANDED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "attention_bias": False,
        "hidden_act": "silu",
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    "qwen3_moe": {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "use_sliding_window": False,
    },
    "gpt_oss": {"attention_bias": True, "hidden_act": "silu"},
}
"""Family -> fields that must have this value if they are there."""

_CLASSES = {
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}


def to_knobs(config: dict[str, Any]) -> dict[str, Any]:
    """Knobs of the model section that a config.json determines; `mtp_layers` as it says.

    Raises:
        ConversionError: it is of no known family, or its model has no counterpart here.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _FIELDS:
        known = ", ".join(_FIELDS)
        raise ConversionError(f"config.json has model_type={family!r}, which is none of {known}")
    for name, value in _DEMANDED[family].items():
        if config.get(name, value) != value:
            raise ConversionError(
                f"config.json has {name}={config[name]!r}; only {value!r} can be imported"
            )
    found = dict(_FIXED[family])
    for name, knob in _FIELDS[family].items():
        found[knob] = value_of(config, name, knob)
    found |= from_rope(config, latent=family == "deepseek_v3")
    if family == "deepseek_v3":
        shared = number(config, "n_shared_experts")
        found["moe.shared_ffn"] = shared * found["moe.ffn"]
        found["mtp_layers"] = number(config, "num_nextn_predict_layers", 0)
        _check_groups(found)
    elif family == "qwen3_moe":
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or dense != list(range(len(dense))):
            raise ConversionError(
                f"config.json has mlp_only_layers={dense}; only leading layers can be dense"
            )
        found["moe.dense_layers"] = len(dense)
    else:
        found |= _windows(config, found["layers"])
    return found


def to_json(m: ModelConfig, context: int, dtype: str) -> dict[str, Any]:
    """config.json of a model.

    Args:
        m: the model section of a configuration.
        context: tokens in a sequence, where the rotary embedding does not tell.
        dtype: of the weights, by torch's name.

    Raises:
        ConversionError: Hugging Face has no such model; the knob is named.
    """
    a, cfg = m.attention, Config(model=m)
    gpt_oss = a.sinks or m.moe.activation == "quick_geglu"
    family = "deepseek_v3" if a.kind == "mla" else "gpt_oss" if gpt_oss else "qwen3_moe"
    for knob, value in _FIXED[family].items():
        if (present := get(cfg, f"model.{knob}")) != value:
            raise ConversionError(
                f"model.{knob}={written(present)} cannot be exported: {family} of Hugging Face has "
                f"{written(value)}"
            )
    result: dict[str, Any] = {"architectures": [_CLASSES[family]], "model_type": family}
    result |= _DEMANDED[family]
    for name, knob in _FIELDS[family].items():
        result[name] = get(cfg, f"model.{knob}")
    result |= {"initializer_range": m.init_std, "torch_dtype": dtype, "rope_theta": a.rope_theta}
    result["rope_scaling"] = to_rope_scaling(m.attention.yarn)
    yarn = a.yarn.factor > 1
    result["max_position_embeddings"] = (
        round(a.yarn.factor * a.yarn.original_context) if yarn else context
    )
    if family == "deepseek_v3":
        _check_groups({k.removeprefix("model."): get(cfg, k) for k in knobs()})
        if not m.moe.router.bias_rate:
            raise ConversionError(
                "model.moe.router.bias_rate=0 cannot be exported: deepseek_v3 of Hugging Face has "
                "an expert bias"
            )
        if not m.moe.shared_ffn or m.moe.shared_ffn % m.moe.ffn:
            raise ConversionError(
                f"model.moe.shared_ffn={m.moe.shared_ffn} cannot be exported: deepseek_v3 of "
                f"Hugging Face has a multiple of model.moe.ffn={m.moe.ffn}"
            )
        result["n_shared_experts"] = m.moe.shared_ffn // m.moe.ffn
        result["num_key_value_heads"] = a.heads
        result["num_nextn_predict_layers"] = m.mtp_layers
        result["q_lora_rank"] = a.q_lora_rank or None
    elif family == "qwen3_moe":
        result["mlp_only_layers"] = list(range(m.moe.dense_layers))
    else:
        result["sliding_window"] = a.window or None
        full = [
            not a.window or (a.window_every > 1 and i % a.window_every == 0)
            for i in range(1, m.layers + 1)
        ]
        result["layer_types"] = [
            "full_attention" if every else "sliding_attention" for every in full
        ]
    return result


def _check_groups(found: dict[str, Any]) -> None:
    """Both sides rank groups by their best experts: two there, top_k / group_topk here."""
    top_k, kept = found["moe.top_k"], found["moe.router.group_topk"]
    if found["moe.router.groups"] > 1 and top_k != 2 * kept:
        raise ConversionError(
            f"top_k={top_k} with group_topk={kept} cannot be converted: groups are ranked by their "
            "best two experts there, by top_k / group_topk here"
        )


def _windows(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Sliding windows of GPT-OSS: on all layers but each n-th."""
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    if not isinstance(kinds, list):
        raise ConversionError("config.json has layer_types that are no list")
    if "sliding_attention" not in kinds:
        return {"attention.window": 0, "attention.window_every": 1}
    full = [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"]
    every = full[0] if full else 1
    expected = [
        "full_attention" if full and i % every == 0 else "sliding_attention"
        for i in range(1, layers + 1)
    ]
    if kinds != expected or (full and every == 1):
        raise ConversionError("config.json has layer_types that are not full at each n-th layer")
    return {"attention.window": number(config, "sliding_window"), "attention.window_every": every}
