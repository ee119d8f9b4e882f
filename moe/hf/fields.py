"""Fields of a config.json, which may come from elsewhere, in the types that knobs have."""

import math
from typing import Any

from configs.knobs import knobs
from moe.hf import ConversionError

_ABSENT = {"tie_word_embeddings": False, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Values of fields that a published config.json may leave out."""


def value_of(config: dict[str, Any], name: str, knob: str) -> Any:
    """A field in the type of `model.<knob>`.

    Raises:
        ConversionError: it is missing, or of another type.
    """
    kind = knobs()[f"model.{knob}"].type
    if name == "num_experts" and name not in config:
        name = "num_local_experts"  # as newer transformers write it
    if name == "q_lora_rank" and config.get(name, 0) is None:
        return 0
    if name == "head_dim" and config.get(name) is None:
        return number(config, "hidden_size") // max(1, number(config, "num_attention_heads"))
    value: Any = config.get(name, _ABSENT.get(name))
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        shown = f"{name}={value!r}" if name in config else f"no {name}"
        raise ConversionError(f"config.json has {shown}; expected {kind.__name__}")
    return value


def number(config: dict[str, Any], name: str, absent: int | None = None) -> int:
    """A field that counts something.

    Raises:
        ConversionError: it is missing, or no such number.
    """
    value = config.get(name, absent)
    if type(value) is not int or value < 0:
        raise ConversionError(f"config.json has {name}={value!r}; expected a number")
    return value
