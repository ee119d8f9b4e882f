"""The rotary embedding in a config.json and in the knobs, with YaRN (arXiv 2309.00071) or without.

transformers 5 writes `rope_parameters`; versions before it, and published folders, `rope_theta` and
`rope_scaling`. Both are read, the second is written, which all versions read.
"""

import math
from typing import Any

from configs.schema import YarnConfig
from moe.hf import ConversionError
from moe.hf.fields import number, value_of

_CONTEXT = "original_max_position_embeddings"


def from_rope(config: dict[str, Any], *, latent: bool) -> dict[str, Any]:
    """Knobs below `model.` that a config.json sets.

    Args:
        config: of Hugging Face.
        latent: the model has latent attention.

    Raises:
        ConversionError: the embedding has no counterpart here.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConversionError("config.json has rope parameters that are no JSON object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    holder = rope if "rope_theta" in rope else config
    found = {
        "attention.rope_theta": value_of(holder, "rope_theta", "attention.rope_theta"),
        "attention.yarn.factor": 1.0,
    }
    if found["attention.rope_theta"] % 1:
        raise ConversionError("config.json has a rope_theta that is no whole number")
    if kind == "default":
        return found
    if kind != "yarn":
        raise ConversionError(f"config.json has rope_type={kind!r}; default and yarn are known")
    yarn = YarnConfig(
        factor=value_of(rope, "factor", "attention.yarn.factor"),
        original_context=number(rope, _CONTEXT),
        truncate=rope.get("truncate", True) is not False,
    )
    if yarn.factor < 1:
        raise ConversionError(f"config.json has factor={yarn.factor}; expected 1 or more")
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if rope.get(name) is not None:
            setattr(yarn, name, value_of(rope, name, f"attention.yarn.{name}"))
    if latent and not yarn.truncate:
        raise ConversionError("config.json has truncate=false, which latent attention has not here")
    if rope.get("attention_factor") is not None:
        given = value_of(rope, "attention_factor", "attention.yarn.factor")
    else:
        # transformers reads mscale and mscale_all_dim only where both are there.
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        given = _temperature(yarn) if both else _temperature(YarnConfig(factor=yarn.factor))
    if not math.isclose(given, _temperature(yarn), rel_tol=1e-6):
        raise ConversionError(
            f"config.json has attention_factor={given}; here it would be {_temperature(yarn)}"
        )
    return found | {f"attention.yarn.{name}": value for name, value in vars(yarn).items()}


def to_rope_scaling(yarn: YarnConfig) -> dict[str, Any] | None:
    """The field `rope_scaling`; None without YaRN."""
    if yarn.factor <= 1:
        return None
    values = dict(vars(yarn))
    scaling = {"rope_type": "yarn", _CONTEXT: values.pop("original_context"), **values}
    return scaling | {"attention_factor": _temperature(yarn)}


def _temperature(yarn: YarnConfig) -> float:
    grow = math.log(yarn.factor) / 10
    return (yarn.mscale * grow + 1) / (yarn.mscale_all_dim * grow + 1)
