"""config.json of Hugging Face and the model section of a configuration, each from the other.

Importing reads field by field; one that nothing has read and that is not harmless is refused by
name. Exporting writes every field whose absence transformers would fill with a value of its own.
"""

from typing import Any

from phalanx.configs.knobs import get, written
from phalanx.configs.schema import Config, ModelConfig
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.families import FAMILIES, HARMLESS
from phalanx.moe.hf.fields import Fields, number, shown, value_of
from phalanx.moe.hf.rope import from_rope, to_rope

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def to_knobs(values: dict[str, Any]) -> dict[str, Any]:
    """Knobs of the model section that a config.json determines; `mtp_layers` as it says.

    The coefficients of balancing losses are among them where it has any.

    Raises:
        ConversionError: it is of no known family, its model has no counterpart here, or it has a
            field that is not known.
    """
    config = Fields(values)
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConversionError(f"config.json has model_type={shown(family)}, not one of {known}")
    kind = FAMILIES[family]
    config.demand(kind.demanded)
    found = dict(kind.fixed)
    for name, knob in kind.fields.items():
        if name == "head_dim" and family == "qwen3_moe" and config.get(name) is None:
            heads = number(config, "num_attention_heads", least=1)
            found[knob] = number(config, "hidden_size") // heads  # as transformers has it
        else:
            found[knob] = value_of(config, name, knob)
    found |= from_rope(config, latent=family == "deepseek_v3", silence=family != "gpt_oss")
    read = {"deepseek_v3": _deepseek_v3, "qwen3_moe": _qwen3_moe, "gpt_oss": _gpt_oss}[family]
    found |= read(config, found)
    _check_one_expert(found)
    _quantised(config)
    besides(values)
    config.refuse_unread(HARMLESS | kind.harmless | {*TOKENS, "max_position_embeddings"})
    return found


def besides(values: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says that no knob holds, and an export repeats: special tokens, context.

    Raises:
        ConversionError: a token is no id.
    """
    config, kept = Fields(values), {}
    for name in TOKENS:
        ids = config.get(name)
        each = ids if isinstance(ids, list) else [ids]
        if ids is not None and not all(type(i) is int and i >= 0 for i in each):
            raise ConversionError(f"config.json has {name}={shown(ids)}; expected an id")
        if ids is not None and ids != []:
            kept[name] = ids
    if config.get("max_position_embeddings") is not None:
        kept["max_position_embeddings"] = number(config, "max_position_embeddings", least=1)
    return kept


def to_json(m: ModelConfig, context: int, dtype: str) -> dict[str, Any]:
    """config.json of a model.

    Args:
        m: the model section of a configuration.
        context: tokens in a sequence, where the rotary embedding does not tell of more.
        dtype: of the weights, by torch's name.

    Raises:
        ConversionError: Hugging Face has no such model; the knob is named.
    """
    a, cfg = m.attention, Config(model=m)
    gpt_oss = a.sinks or m.moe.activation == FAMILIES["gpt_oss"].fixed["moe.activation"]
    family = "deepseek_v3" if a.kind == "mla" else "gpt_oss" if gpt_oss else "qwen3_moe"
    kind = FAMILIES[family]
    for knob, value in kind.fixed.items():
        if (present := get(cfg, f"model.{knob}")) != value:
            raise _refused(knob, written(present), f"{family} of Hugging Face has {written(value)}")
    result: dict[str, Any] = {"architectures": [kind.architecture], "model_type": family}
    result |= kind.demanded
    for name, knob in kind.fields.items():
        result[name] = get(cfg, f"model.{knob}")
    if "norm_topk_prob" in result:
        result["norm_topk_prob"] &= m.moe.top_k > 1  # one expert is not normalised here
    result |= to_rope(a.rope_theta, a.yarn)
    if a.yarn.factor > 1:
        context = max(context, round(a.yarn.factor * a.yarn.original_context))
    result |= {"initializer_range": m.init_std, "dtype": dtype, "torch_dtype": dtype}
    result |= {"max_position_embeddings": context, **dict.fromkeys(TOKENS)}
    if family == "deepseek_v3":
        result |= _to_deepseek_v3(m)
    else:
        # transformers has one coefficient, for the loss over all tokens of a batch.
        result["router_aux_loss_coef"] = m.moe.router.aux_loss or m.moe.router.global_aux_loss
    if family == "qwen3_moe":
        result["mlp_only_layers"] = list(range(m.moe.dense_layers))
    elif family == "gpt_oss":
        if not m.moe.activation_limit:
            raise _refused("moe.activation_limit", 0, "gpt_oss of Hugging Face always clamps")
        # transformers runs no model without a window, even where no layer has one.
        result["sliding_window"] = a.window or context
        every = a.window_every if a.window else 1
        result["layer_types"] = _kinds(m.layers, every, windows=a.window > 0)
    return result


# --- one family -----------------------------------------------------------------------------------


def _deepseek_v3(config: Fields, found: dict[str, Any]) -> dict[str, Any]:
    heads, rope = found["attention.heads"], found["attention.qk_rope_dim"]
    config.demand(
        {
            "num_key_value_heads": heads,
            "head_dim": rope,  # that is rotated, as transformers writes it
            "qk_head_dim": found["attention.qk_nope_dim"] + rope,
        }
    )
    rank = config.get("q_lora_rank", "")
    shared = number(config, "n_shared_experts")
    _check_groups(found["moe.top_k"], found["moe.router.groups"], found["moe.router.group_topk"])
    more = {
        "attention.q_lora_rank": 0 if rank is None else number(config, "q_lora_rank"),
        "moe.shared_ffn": shared * found["moe.ffn"],
        "mtp_layers": number(config, "num_nextn_predict_layers", 0),
    }
    per_sequence = config.get("seq_aux", True)
    if type(per_sequence) is not bool:
        raise ConversionError(f"config.json has seq_aux={shown(per_sequence)}; expected bool")
    if "aux_loss_alpha" in config:
        alpha = value_of(config, "aux_loss_alpha", "moe.router.aux_loss")
        more["moe.router.seq_aux_loss"] = alpha if per_sequence else 0.0
        more["moe.router.aux_loss"] = 0.0 if per_sequence else alpha
    return more


def _to_deepseek_v3(m: ModelConfig) -> dict[str, Any]:
    router = m.moe.router
    limited = router.group_topk < router.groups
    _check_groups(m.moe.top_k, router.groups, router.group_topk)
    if not router.bias_rate:
        raise _refused("moe.router.bias_rate", 0, "deepseek_v3 of Hugging Face has an expert bias")
    if not m.moe.shared_ffn or m.moe.shared_ffn % m.moe.ffn:
        has = f"deepseek_v3 of Hugging Face has a multiple of model.moe.ffn={m.moe.ffn}"
        raise _refused("moe.shared_ffn", m.moe.shared_ffn, has)
    return {
        "n_group": router.groups if limited else 1,
        "topk_group": router.group_topk if limited else 1,
        "n_shared_experts": m.moe.shared_ffn // m.moe.ffn,
        "num_key_value_heads": m.attention.heads,
        "num_nextn_predict_layers": m.mtp_layers,
        "q_lora_rank": m.attention.q_lora_rank or None,
        "seq_aux": not router.aux_loss,
        "aux_loss_alpha": router.aux_loss or router.seq_aux_loss,
    }


def _qwen3_moe(config: Fields, found: dict[str, Any]) -> dict[str, Any]:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ConversionError(
            f"config.json has mlp_only_layers={shown(dense)}; only leading layers can be dense"
        )
    if config.get("layer_types") is not None:
        config.demand({"layer_types": [_FULL] * found["layers"]})
    _check_heads(found)
    return {"moe.dense_layers": len(dense), **_aux_loss(config)}


def _gpt_oss(config: Fields, found: dict[str, Any]) -> dict[str, Any]:
    if found["moe.activation_limit"] <= 0:
        limit = found["moe.activation_limit"]
        raise ConversionError(f"config.json has swiglu_limit={limit}; expected a number above 0")
    if found["attention.yarn.factor"] > 1:
        config.demand({"initial_context_length": found["attention.yarn.original_context"]})
    else:
        config.get("initial_context_length")  # is of YaRN
    _check_heads(found)
    return {**_windows(config, found["layers"]), **_aux_loss(config)}


def _windows(config: Fields, layers: int) -> dict[str, Any]:
    """Sliding windows: on all layers but each n-th."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if kinds is None:
        kinds = _kinds(layers, 2, windows=True)
    if not isinstance(kinds, list):
        raise ConversionError(f"config.json has layer_types={shown(kinds)}; expected a list")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise ConversionError(
                f"config.json has {shown(kind)} in layer_types; {_FULL} and {_SLIDING} are known"
            )
    if kinds == [_FULL] * layers:
        return {"attention.window": 0, "attention.window_every": 1}
    every = kinds.index(_FULL) + 1 if _FULL in kinds else 1
    if kinds != _kinds(layers, every, windows=True):
        raise ConversionError("config.json has layer_types that are not full at each n-th layer")
    if type(window) is not int or window < 1:
        raise ConversionError(
            f"config.json has sliding_window={shown(window)} and sliding layers; expected a number"
        )
    return {"attention.window": window, "attention.window_every": every}


def _kinds(layers: int, every: int, *, windows: bool) -> list[str]:
    """`layer_types`: each `every`-th layer full, or without windows all; 1 stands for none."""
    full = [not windows or (every > 1 and i % every == 0) for i in range(1, layers + 1)]
    return [_FULL if each else _SLIDING for each in full]


# --- parts of several families --------------------------------------------------------------------


def _aux_loss(config: Fields) -> dict[str, Any]:
    if "router_aux_loss_coef" not in config:
        return {}
    coefficient = value_of(config, "router_aux_loss_coef", "moe.router.aux_loss")
    return {"moe.router.aux_loss": coefficient, "moe.router.seq_aux_loss": 0.0}


def _check_heads(found: dict[str, Any]) -> None:
    heads, shared = found["attention.heads"], found["attention.kv_heads"]
    if shared < 1 or heads % shared:
        raise ConversionError(
            f"config.json has num_key_value_heads={shared}, which does not divide "
            f"num_attention_heads={heads}"
        )


def _check_one_expert(found: dict[str, Any]) -> None:
    """transformers normalises the weight of a single expert to 1; a router learns nothing so."""
    over_top_k = found.get("moe.router.softmax_over") == "topk"
    if found["moe.top_k"] == 1 and (over_top_k or found["moe.router.normalize"]):
        why = "softmax over one expert" if over_top_k else "norm_topk_prob=true"
        raise ConversionError(
            f"config.json has num_experts_per_tok=1 with {why}, a weight that is always 1, from "
            "which no router learns; there is no such model here"
        )


def _check_groups(top_k: int, groups: int, kept: int) -> None:
    """Both sides rank groups by their best experts: two there, top_k / group_topk here."""
    if kept < groups and top_k != 2 * kept:
        raise ConversionError(
            f"top_k={top_k} with group_topk={kept} cannot be converted: groups are ranked by their "
            "best two experts there, by top_k / group_topk here"
        )


def _quantised(config: Fields) -> None:
    """Formats that `hf.source` reads; how large the blocks are is its question."""
    stored = config.inner("quantization_config")
    if stored is None:
        return
    method = stored.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise ConversionError(f"{stored.where} has quant_method={shown(method)}, not fp8 or mxfp4")
    harmless = {"modules_to_not_convert", "ignored_layers", "dequantize"}
    if method == "fp8":
        stored.demand({"fmt": "e4m3", "expert_dtype": "fp8"})
        harmless |= {"activation_scheme", "scale_fmt", "weight_block_size"}
    stored.refuse_unread(frozenset(harmless))


def _refused(knob: str, value: Any, reason: str) -> ConversionError:
    return ConversionError(f"model.{knob}={value} cannot be exported: {reason}")
