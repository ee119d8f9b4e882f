"""Export of each family's config.json fields that are not knobs of the same value."""

from collections.abc import Callable
from typing import Any

from phalanx.configs.schema import ModelConfig
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.reading import check_groups, kinds_of_layers, linear_kinds

Json = dict[str, Any]


def refused(knob: str, value: Any, reason: str) -> ConversionError:
    """Error for a knob value that Hugging Face does not support."""
    return ConversionError(f"model.{knob}={value} cannot be exported: {reason}")


# --- one family -----------------------------------------------------------------------------------


def _deepseek_v3(m: ModelConfig, context: int) -> Json:
    _has_choice_bias(m, "deepseek_v3")
    mtp = {"num_nextn_predict_layers": m.mtp_layers}
    return _latent(m, "deepseek_v3") | _groups(m) | mtp


def _deepseek_v2(m: ModelConfig, context: int) -> Json:
    return _latent(m, "deepseek_v2") | {"n_group": 1, "topk_group": 1}


def _qwen3_moe(m: ModelConfig, context: int) -> Json:
    return {"mlp_only_layers": list(range(m.moe.dense_layers)), **_aux_loss(m)}


def _nothing(m: ModelConfig, context: int) -> Json:
    return {}


def _gpt_oss(m: ModelConfig, context: int) -> Json:
    a = m.attention
    if not m.moe.activation_limit:
        raise refused("moe.activation_limit", 0, "gpt_oss of Hugging Face always clamps")
    every = a.window_every if a.window else 1
    return {
        **_aux_loss(m),
        # transformers needs a window, even if no layer uses one.
        "sliding_window": a.window or context,
        "layer_types": kinds_of_layers(m.layers, every, windows=a.window > 0),
    }


def _mixtral(m: ModelConfig, context: int) -> Json:
    return {"sliding_window": m.attention.window or None, **_aux_loss(m)}


def _olmoe(m: ModelConfig, context: int) -> Json:
    a = m.attention
    if a.heads * a.head_dim != m.hidden:
        has = f"olmoe of Hugging Face has model.hidden={m.hidden} / heads={a.heads}"
        raise refused("attention.head_dim", a.head_dim, has)
    return _aux_loss(m)


def _glm4_moe(m: ModelConfig, context: int) -> Json:
    _has_choice_bias(m, "glm4_moe")
    mtp = {"num_nextn_predict_layers": m.mtp_layers}
    return _shared(m, "glm4_moe") | _groups(m) | mtp


def _minimax_m2(m: ModelConfig, context: int) -> Json:
    _has_choice_bias(m, "minimax_m2")
    a = m.attention
    return {
        "attn_type_list": [1] * m.layers,
        "rotary_dim": a.rotary_dim or a.head_dim,
        **_aux_loss(m),
    }


def _qwen3_next(m: ModelConfig, context: int) -> Json:
    every = m.linear_attention.full_attention_interval
    if m.mtp_layers > 1:
        raise refused("mtp_layers", m.mtp_layers, "qwen3_next of Hugging Face has at most 1")
    if not m.moe.shared_ffn:
        raise refused("moe.shared_ffn", 0, "qwen3_next of Hugging Face has a shared expert")
    return {
        "full_attention_interval": every,
        "layer_types": linear_kinds(m.layers, every),
        "mlp_only_layers": [],
        **_aux_loss(m),
    }


WRITERS: dict[str, Callable[[ModelConfig, int], Json]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama": _nothing,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3": _nothing,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
}
"""Writer by family: a function of a model and the tokens in a sequence."""


# --- parts of several families --------------------------------------------------------------------


def _latent(m: ModelConfig, family: str) -> Json:
    """Latent attention and shared experts of DeepSeek."""
    router = m.moe.router
    return {
        **_shared(m, family),
        "num_key_value_heads": m.attention.heads,
        "q_lora_rank": m.attention.q_lora_rank or None,
        "seq_aux": not router.aux_loss,
        "aux_loss_alpha": router.aux_loss or router.seq_aux_loss,
    }


def _shared(m: ModelConfig, family: str) -> Json:
    if not m.moe.shared_ffn or m.moe.shared_ffn % m.moe.ffn:
        has = f"{family} of Hugging Face has a multiple of model.moe.ffn={m.moe.ffn}"
        raise refused("moe.shared_ffn", m.moe.shared_ffn, has)
    return {"n_shared_experts": m.moe.shared_ffn // m.moe.ffn}


def _groups(m: ModelConfig) -> Json:
    router = m.moe.router
    limited = router.group_topk < router.groups
    check_groups(m.moe.top_k, router.groups, router.group_topk)
    return {
        "n_group": router.groups if limited else 1,
        "topk_group": router.group_topk if limited else 1,
    }


def _has_choice_bias(m: ModelConfig, family: str) -> None:
    if not m.moe.router.bias_rate:
        raise refused("moe.router.bias_rate", 0, f"{family} of Hugging Face has an expert bias")


def _aux_loss(m: ModelConfig) -> Json:
    """transformers has one coefficient, for the loss over all tokens of a batch."""
    return {"router_aux_loss_coef": m.moe.router.aux_loss or m.moe.router.global_aux_loss}
