"""Conversion between config.json of Hugging Face and the model section of a configuration.

Import reads field by field; an unread field that is not harmless is an error. Export writes every
field that transformers would otherwise set to a default.
"""

from typing import Any

from phalanx.configs.knobs import get, spelled
from phalanx.configs.schema import Config, ModelConfig
from phalanx.moe.data.host_cache import DataError
from phalanx.moe.data.tokenizer.special_tokens import TOKENS, shown, token_ids
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.families import ALIASES, FAMILIES, HARMLESS, family_of
from phalanx.moe.hf.fields import Fields, number, value_of
from phalanx.moe.hf.reading import READERS, check_one_expert, check_quantised
from phalanx.moe.hf.rope import Heads, from_rope, rotated_share, to_rope
from phalanx.moe.hf.writing import WRITERS, refused

_HEADS_FILL_HIDDEN = ("glm4_moe", "llama", "mixtral", "olmoe", "qwen3_moe")
"""Families whose heads have hidden_size / num_attention_heads channels by default."""


def to_knobs(values: dict[str, Any]) -> dict[str, Any]:
    """Knobs of the model section that a config.json determines.

    They include coefficients of balancing losses, if it has any.

    Raises:
        ConversionError: it has no known family, a model without a counterpart, or an unknown
            field.
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
    """Prefix of tensor names of a layer of multi-token prediction.

    Args:
        config: config.json that `to_knobs` accepts.
        layer: number of the layer, counted after those of the decoder.
    """
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

    Raises:
        ConversionError: a token is no id.
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

    Args:
        m: the model section of a configuration.
        context: tokens in a sequence, unless the rotary embedding reaches further.
        dtype: of the weights, by torch's name.

    Raises:
        ConversionError: Hugging Face has no such model; the knob is named.
    """
    a, cfg, family = m.attention, Config(model=m), family_of(m)
    kind = FAMILIES[family]
    for knob, value in kind.fixed.items():
        present = get(cfg, f"model.{knob}")
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
