"""Conversion between config.json of Hugging Face and the model section of a configuration.

Import reads field by field; an unread field that is not harmless is an error. Export writes every
field that transformers would otherwise set to a default.

transformers 5 writes `rope_parameters`; older versions, and published folders, have `rope_theta`
and `rope_scaling`. Both are read. An export writes fields that every version reads the same way:
`rope_scaling` for YaRN (arXiv 2309.00071), else explicit `rope_parameters`, as the default is YaRN
for some models.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.configs.knobs import get, spelled
from phalanx.configs.schema import Config, ModelConfig, YarnConfig
from phalanx.configs.tables.capabilities import RATES
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.special_tokens import TOKENS, shown, token_ids
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.families import ALIASES, FAMILIES, HARMLESS, family_of
from phalanx.moe.hf.reading import (
    READERS,
    Fields,
    check_groups,
    check_one_expert,
    check_quantised,
    kinds_of_layers,
    linear_kinds,
    number,
    value_of,
)

Json = dict[str, Any]


def refused(knob: str, value: Any, reason: str) -> ConversionError:
    """Error for a knob value that Hugging Face does not support."""
    return ConversionError(f"model.{knob}={value} cannot be exported: {reason}")


# --- one family -----------------------------------------------------------------------------------


def _deepseek_v3(m: ModelConfig, context: int) -> Json:
    _has_choice_bias(m, "deepseek_v3")
    mtp = {"num_nextn_predict_layers": m.mtp_layers}
    return _latent(m, "deepseek_v3") | _groups(m) | mtp


def _indexed(m: ModelConfig, context: int) -> Json:
    sparse = {"heads": 64, "dim": 128, "top_k": 2048} | m.attention.sparse
    own = {"indexer_types": ["full"] * m.layers} if sparse.get("interleaved") else {}
    return _deepseek_v3(m, context) | {
        "index_n_heads": sparse["heads"],
        "index_head_dim": sparse["dim"],
        "index_topk": sparse["top_k"],
        **own,
    }


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
    "deepseek_v32": _indexed,
    "glm_moe_dsa": _indexed,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama": _nothing,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3": _nothing,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
}  # functions of a model and the tokens in a sequence


# --- parts of several families --------------------------------------------------------------------


def _latent(m: ModelConfig, family: str) -> Json:
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


_CONTEXT = "original_max_position_embeddings"
_FIELDS = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Heads:
    """Rotated heads of a family."""

    latent: bool = False
    silence: bool = True  # a config.json with neither field means no YaRN
    channels: int = 0  # of a head, in families that may rotate some; 0 if they rotate all
    share: float = 1.0  # default fraction of these that is rotated


def from_rope(config: Fields, heads: Heads) -> dict[str, Any]:
    """Knobs below `model.` of the rotary embedding in a config.json.

    Raises ConversionError if the embedding has no counterpart here, or is ambiguous.
    """
    ropes = [rope for name in _FIELDS if (rope := config.inner(name)) is not None]
    if not ropes and not heads.silence:
        raise ConversionError(
            f"{config.where} has neither rope_parameters nor rope_scaling, which some versions of "
            'transformers read as YaRN: write "rope_parameters": {"rope_type": "default", '
            '"rope_theta": ...}, or those of YaRN'
        )
    readings = [_read(rope, config, heads) for rope in ropes]
    if len(readings) > 1 and readings[0] != readings[1]:
        raise ConversionError(f"{config.where} has rope_parameters and rope_scaling that differ")
    return readings[0] if readings else _read(Fields({}, config.where), config, heads)


def _read(rope: Fields, config: Fields, heads: Heads) -> dict[str, Any]:
    kind = rope.one("rope_type", "type") or "default"
    holders = [holder for holder in (rope, config) if "rope_theta" in holder] or [config]
    thetas = [value_of(holder, "rope_theta", "attention.rope_theta") for holder in holders]
    theta = thetas[0]
    if thetas[-1] != theta:
        raise ConversionError(
            f"{config.where} has rope_theta={thetas[-1]}, and {theta} in {rope.where}"
        )
    if theta % 1:
        raise ConversionError(f"{config.where} has a rope_theta that is no integer")
    rotated = _rotated(rope, config, heads)
    if kind not in ("default", "yarn"):
        raise ConversionError(
            f"{rope.where} has rope_type={shown(kind)}; default and yarn are known"
        )
    values: dict[str, Any] = {"factor": 1.0}
    if kind == "yarn":
        values = vars(_yarn(rope, heads.latent))
        if rotated.get("attention.rotary_dim"):
            raise ConversionError(
                f"{rope.where} has YaRN on a part of each head, which is not supported"
            )
    rope.refuse_unread()
    yarn = {f"attention.yarn.{name}": value for name, value in values.items()}
    return {"attention.rope_theta": theta, **yarn, **rotated}


def _rotated(rope: Fields, config: Fields, heads: Heads) -> dict[str, Any]:
    if not heads.channels:
        rope.demand({"partial_rotary_factor": 1.0})
        return {}
    dims: dict[str, int] = {}
    for holder in (rope, config):
        if holder.get("partial_rotary_factor") is not None:
            share = value_of(holder, "partial_rotary_factor", "attention.rope_theta")
            dims[f"partial_rotary_factor={share} in {holder.where}"] = int(heads.channels * share)
    if config.get("rotary_dim") is not None:
        dims["rotary_dim"] = number(config, "rotary_dim", least=1)
    if len(set(dims.values())) > 1:
        raise ConversionError(f"{config.where} has {' and '.join(dims)}, which differ")
    dim = next(iter(dims.values()), int(heads.channels * heads.share))
    if dim % 2 or not 0 < dim <= heads.channels:
        raise ConversionError(
            f"{config.where} rotates {dim} of {heads.channels} channels of a head; expected an "
            "even number"
        )
    return {"attention.rotary_dim": 0 if dim == heads.channels else dim}


def _yarn(rope: Fields, latent: bool) -> YarnConfig:
    yarn = YarnConfig(
        factor=value_of(rope, "factor", "attention.yarn.factor"),
        original_context=number(rope, _CONTEXT, least=1),
    )
    if "truncate" in rope:
        yarn.truncate = value_of(rope, "truncate", "attention.yarn.truncate")
    if yarn.factor < 1:
        raise ConversionError(f"{rope.where} has factor={yarn.factor}; expected 1 or more")
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if rope.get(name) is not None:
            setattr(yarn, name, value_of(rope, name, f"attention.yarn.{name}"))
    if latent and not yarn.truncate:
        raise ConversionError(
            f"{rope.where} has truncate=false, which is not supported with latent attention"
        )
    if rope.get("attention_factor") is not None:
        factor = value_of(rope, "attention_factor", "attention.yarn.factor")
    else:
        # transformers reads mscale and mscale_all_dim only if both are present.
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        factor = _temperature(yarn) if both else _temperature(YarnConfig(factor=yarn.factor))
    if not math.isclose(factor, _temperature(yarn), rel_tol=1e-6):
        raise ConversionError(
            f"{rope.where} has attention_factor={factor}; expected {_temperature(yarn)}"
        )
    return yarn


def rotated_share(dim: int, channels: int) -> float:
    """`partial_rotary_factor` for which transformers' int(channels * factor) is `dim`."""
    share = dim / channels
    return share if int(channels * share) == dim else math.nextafter(share, 1.0)


def to_rope(theta: float, yarn: YarnConfig, share: float | None = None) -> dict[str, Any]:
    """Fields of a config.json for the rotary embedding; `share` of a head is rotated, if given."""
    part = {} if share is None else {"partial_rotary_factor": share}
    if yarn.factor <= 1:
        plain = {"rope_type": "default", "rope_theta": theta, **part}
        return {"rope_theta": theta, "rope_scaling": None, "rope_parameters": plain, **part}
    values = dict(vars(yarn))
    scaling = {"rope_type": "yarn", _CONTEXT: values.pop("original_context"), **values}
    scaling["attention_factor"] = _temperature(yarn)
    return {"rope_theta": theta, "rope_scaling": {**scaling, **part}, **part}


def _temperature(yarn: YarnConfig) -> float:
    grow = math.log(yarn.factor) / 10
    return (yarn.mscale * grow + 1) / (yarn.mscale_all_dim * grow + 1)


_HEADS_FILL_HIDDEN = ("glm4_moe", "llama", "mixtral", "olmoe", "qwen3_moe")
"""Families whose heads have hidden_size / num_attention_heads channels by default."""


def to_knobs(values: dict[str, Any]) -> dict[str, Any]:
    """Knobs of the model section, and balancing losses if any, that a config.json determines.

    Raises:
        ConversionError: it has an unknown family or field, or a model without a counterpart.
    """
    config = Fields(values)
    named = config.get("model_type")
    family = ALIASES.get(named, named) if isinstance(named, str) else ""
    if family not in FAMILIES:
        known = ", ".join([*FAMILIES, *ALIASES])
        raise ConversionError(f"config.json has model_type={shown(named)}, not one of {known}")
    kind = FAMILIES[family]
    config.demand(kind.demanded)
    knobs = dict(kind.fixed)
    for name, knob in kind.fields.items():
        if name == "head_dim" and family in _HEADS_FILL_HIDDEN and config.get(name) is None:
            heads = number(config, "num_attention_heads", least=1)
            knobs[knob] = number(config, "hidden_size") // heads  # transformers' default
        else:
            knobs[knob] = value_of(config, name, knob)
    knobs |= from_rope(config, _rotated_heads(family, knobs))
    knobs |= READERS[family](config, knobs)
    check_one_expert(knobs)
    check_quantised(config)
    besides(values)
    config.refuse_unread(HARMLESS | kind.harmless | {*TOKENS, "max_position_embeddings"})
    return knobs


def prediction_prefix(config: dict[str, Any], layer: int) -> str:
    """Prefix of tensor names of a layer of multi-token prediction, counted after the decoder's."""
    family = str(config["model_type"])
    names = FAMILIES[ALIASES.get(family, family)].names
    return names.prediction or f"model.layers.{layer}."


def _rotated_heads(family: str, knobs: dict[str, Any]) -> Heads:
    latent, share = knobs["attention.kind"] == "mla", FAMILIES[family].partial_rotary
    if share is None:
        return Heads(latent=latent, silence=family != "gpt_oss")
    return Heads(channels=knobs["attention.head_dim"], share=share)


def besides(values: dict[str, Any]) -> dict[str, Any]:
    """Fields of a config.json without a knob that an export repeats: special tokens, context.

    Raises ConversionError if a token is no id.
    """
    config = Fields(values)
    try:
        extra: dict[str, Any] = dict(token_ids(config))
    except DataError as error:
        raise ConversionError(str(error)) from None
    if config.get("max_position_embeddings") is not None:
        extra["max_position_embeddings"] = number(config, "max_position_embeddings", least=1)
    return extra


def _is_over_top_k(m: ModelConfig) -> bool:
    """True if normalized probabilities of the top k experts equal a softmax over the top k."""
    return m.moe.router.normalize and m.moe.top_k > 1


def to_json(m: ModelConfig, context: int, dtype: str) -> dict[str, Any]:
    """config.json of a model.

    The `context` in tokens applies unless the rotary embedding reaches further; `dtype` is torch's
    name. Raises ConversionError if Hugging Face has no such model; the knob is named.
    """
    a, cfg, family = m.attention, Config(model=m), family_of(m)
    kind = FAMILIES[family]
    for knob, value in {**kind.fixed, "variants": []}.items():
        present = get(cfg, f"model.{knob}")
        if knob == "variants":
            present = [text for text in present if not text.startswith(RATES)]
        if present != value and not (knob == "moe.router.softmax_over" and _is_over_top_k(m)):
            raise refused(knob, spelled(present), f"{family} of Hugging Face has {spelled(value)}")
    result: dict[str, Any] = {"architectures": [kind.architecture], "model_type": family}
    result |= kind.demanded
    for name, knob in kind.fields.items():
        result[name] = get(cfg, f"model.{knob}")
    if "norm_topk_prob" in result:
        result["norm_topk_prob"] &= m.moe.top_k > 1  # one expert is not normalised here
    part = rotated_share(a.rotary_dim or a.head_dim, a.head_dim)
    result |= to_rope(a.rope_theta, a.yarn, None if kind.partial_rotary is None else part)
    if a.yarn.factor > 1:
        context = max(context, round(a.yarn.factor * a.yarn.original_context))
    result |= {"initializer_range": m.init_std, "dtype": dtype, "torch_dtype": dtype}
    result |= {"max_position_embeddings": context, **dict.fromkeys(TOKENS)}
    return result | WRITERS[family](m, context)
