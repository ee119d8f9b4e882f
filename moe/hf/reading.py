"""Import of each family's config.json fields that are not knobs of the same value.

Functions of the fields and of the knobs read so far; they return more knobs below `model.`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from phalanx.configs.knobs import knobs
from phalanx.moe.data.tokenizer.special_tokens import shown
from phalanx.moe.hf import ConversionError

_OTHER_NAMES = {
    "num_experts": "num_local_experts",
    "n_routed_experts": "num_local_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "num_nextn_predict_layers": "num_mtp_layers",
}
"""Name of a field in newer or older files."""

_ABSENT = {"tie_word_embeddings": False, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}

_BEYOND = 100
"""Limit of a size, as a multiple of the largest published one: without it, the list of layers of
an invalid file could take all memory before other checks."""


class Fields(Mapping[str, Any]):
    """An untrusted JSON object, `where` in messages, that records which fields have been read."""

    def __init__(self, values: dict[str, Any], where: str = "config.json") -> None:
        self._values, self.where = values, where
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values  # asking is not reading

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def inner(self, name: str) -> "Fields | None":
        """The object in a field, None if absent or empty; a ConversionError for something else."""
        value = self.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise ConversionError(f"{self.where} has {name}={shown(value)}; expected a JSON object")
        return Fields(value, f"{name} of {self.where}")

    def one(self, *names: str) -> Any:
        """The common value of those of these fields that exist; None without any.

        Raises ConversionError if two of them differ.
        """
        present = [name for name in names if name in self]
        for name in present[1:]:
            if self[name] != self[present[0]]:
                both = f"{present[0]}={shown(self[present[0]])} and {name}={shown(self[name])}"
                raise ConversionError(f"{self.where} has {both}, which mean the same and differ")
        return self[present[0]] if present else None

    def demand(self, values: Mapping[str, Any]) -> None:
        """Read fields with a single supported value, also their default; else a ConversionError."""
        for name, value in values.items():
            if (actual := self.get(name, value)) != value:
                raise ConversionError(
                    f"{self.where} has {name}={shown(actual)}; only {shown(value)} can be imported"
                )

    def refuse_unread(self, harmless: frozenset[str] = frozenset()) -> None:
        """Raise ConversionError for a field that has not been read and is not harmless."""
        for name in sorted(self._values.keys() - self._read - harmless):
            raise ConversionError(
                f"{self.where} has {name}={shown(self._values[name])}, which is not known here; "
                "remove it if the model is the same without it"
            )


def value_of(config: Fields, name: str, knob: str) -> Any:
    """The value of a field in the type of `model.<knob>`; else a ConversionError."""
    kind = knobs()[f"model.{knob}"].type
    value: Any = config.one(name, _OTHER_NAMES.get(name, name))
    if value is None and name not in config:
        value = _ABSENT.get(name)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        found = f"{name}={shown(value)}" if name in config else f"no {name}"
        raise ConversionError(f"{config.where} has {found}; expected {kind.__name__}")
    most = knobs()[f"model.{knob}"].facts.largest_published
    if most is not None and value > _BEYOND * most:
        raise ConversionError(
            f"{config.where} has {name}={shown(value)}; published models have at most {most:,}"
        )
    return value


def number(config: Fields, name: str, absent: int | None = None, least: int = 0) -> int:
    """The value of an integer field; a ConversionError if missing or less than `least`."""
    value = config.one(name, _OTHER_NAMES.get(name, name))
    if value is None and name not in config:
        value = absent
    if type(value) is not int or value < least:
        expected = f"a number of {least} or more" if least else "a number"
        raise ConversionError(f"{config.where} has {name}={shown(value)}; expected {expected}")
    return value


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

Knobs = dict[str, Any]


# --- one family -----------------------------------------------------------------------------------


def _deepseek_v3(config: Fields, knobs: Knobs) -> Knobs:
    check_groups(knobs["moe.top_k"], knobs["moe.router.groups"], knobs["moe.router.group_topk"])
    return {**_latent(config, knobs), "mtp_layers": number(config, "num_nextn_predict_layers", 0)}


def _indexed(config: Fields, knobs: Knobs, *, interleaved: bool) -> Knobs:
    """Latent attention with an indexer in every layer (DeepSeek-V3.2, GLM-5)."""
    number(config, "q_lora_rank", least=1)  # its queries are made of that latent
    kinds = {"layer_types": "indexed_attention", "indexer_types": "full"}
    for name, kind in kinds.items():
        if config.get(name) is not None:  # other types share the keys of another layer
            config.demand({name: [kind] * knobs["layers"]})
    dense = min(knobs["moe.dense_layers"], knobs["layers"])
    if config.get("mlp_layer_types") is not None:
        kinds_of_mlp = ["dense"] * dense + ["sparse"] * (knobs["layers"] - dense)
        config.demand({"mlp_layer_types": kinds_of_mlp})
    if "index_topk_pattern" in config or number(config, "index_topk_freq", 1) > 1:
        raise ConversionError(
            "config.json has layers that share the keys of another one (index_topk_freq, "
            "index_topk_pattern), which are not supported"
        )
    config.get("index_skip_topk_offset")  # of such layers
    sparse = {
        "heads": number(config, "index_n_heads", 32 if interleaved else 64, least=1),
        "dim": number(config, "index_head_dim", 128, least=knobs["attention.qk_rope_dim"]),
        "top_k": number(config, "index_topk", 2048, least=1),
        **({"interleaved": True} if interleaved else {}),
    }
    return {**_deepseek_v3(config, knobs), "attention.sparse": sparse}


def _deepseek_v2(config: Fields, knobs: Knobs) -> Knobs:
    return _latent(config, knobs)


def _qwen3_moe(config: Fields, knobs: Knobs) -> Knobs:
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise ConversionError(
            f"config.json has mlp_only_layers={shown(dense)}; only leading layers can be dense"
        )
    if config.get("layer_types") is not None:
        config.demand({"layer_types": [FULL] * knobs["layers"]})
    _check_heads(knobs)
    return {"moe.dense_layers": len(dense), **_aux_loss(config)}


def _qwen3(config: Fields, knobs: Knobs) -> Knobs:
    if config.get("layer_types") is not None:
        config.demand({"layer_types": [FULL] * knobs["layers"]})
    _check_heads(knobs)
    return {}


def _llama(config: Fields, knobs: Knobs) -> Knobs:
    _check_heads(knobs)
    return {}


def _gpt_oss(config: Fields, knobs: Knobs) -> Knobs:
    if knobs["moe.activation_limit"] <= 0:
        limit = knobs["moe.activation_limit"]
        raise ConversionError(f"config.json has swiglu_limit={limit}; expected a number above 0")
    if knobs["attention.yarn.factor"] > 1:
        config.demand({"initial_context_length": knobs["attention.yarn.original_context"]})
    else:
        config.get("initial_context_length")  # used by YaRN only
    _check_heads(knobs)
    return {**_windows(config, knobs["layers"]), **_aux_loss(config)}


def _mixtral(config: Fields, knobs: Knobs) -> Knobs:
    window = config.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise ConversionError(f"config.json has sliding_window={shown(window)}; expected a number")
    _check_heads(knobs)
    return {"attention.window": window or 0, **_aux_loss(config)}


def _olmoe(config: Fields, knobs: Knobs) -> Knobs:
    hidden, heads = knobs["hidden"], knobs["attention.heads"]
    if knobs["attention.head_dim"] * heads != hidden:
        head_dim = knobs["attention.head_dim"]
        raise ConversionError(
            f"config.json has head_dim={head_dim}, and heads fill hidden_size={hidden} in OLMoE"
        )
    _check_heads(knobs)
    return _aux_loss(config)


def _glm4_moe(config: Fields, knobs: Knobs) -> Knobs:
    check_groups(knobs["moe.top_k"], knobs["moe.router.groups"], knobs["moe.router.group_topk"])
    _check_heads(knobs)
    return {
        "moe.shared_ffn": number(config, "n_shared_experts") * knobs["moe.ffn"],
        "mtp_layers": number(config, "num_nextn_predict_layers", 0),
    }


def _minimax_m2(config: Fields, knobs: Knobs) -> Knobs:
    config.demand({"attn_type_list": [1] * knobs["layers"]})  # 0 is linear attention
    _check_heads(knobs)
    return _aux_loss(config)


def _qwen3_next(config: Fields, knobs: Knobs) -> Knobs:
    if config.get("mlp_only_layers"):
        config.demand({"mlp_only_layers": []})
    _check_heads(knobs)
    keys, values = (knobs[f"linear_attention.{kind}_heads"] for kind in ("key", "value"))
    if keys < 1 or values < 1 or values % keys:
        raise ConversionError(
            f"config.json has linear_num_key_heads={keys}, which does not divide "
            f"linear_num_value_heads={values}"
        )
    return {
        "linear_attention.full_attention_interval": _full_attention_interval(config, knobs),
        # The published weights have a prediction layer that config.json does not mention.
        "mtp_layers": number(config, "num_nextn_predict_layers", 1),
        **_aux_loss(config),
    }


READERS: dict[str, Callable[[Fields, Knobs], Knobs]] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": partial(_indexed, interleaved=False),
    "glm_moe_dsa": partial(_indexed, interleaved=True),
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
}


# --- parts of several families --------------------------------------------------------------------


def _latent(config: Fields, knobs: Knobs) -> Knobs:
    heads, rope = knobs["attention.heads"], knobs["attention.qk_rope_dim"]
    config.demand(
        {
            "num_key_value_heads": heads,
            "head_dim": rope,  # the rotated part, as transformers writes it
            "qk_head_dim": knobs["attention.qk_nope_dim"] + rope,
        }
    )
    rank = config.get("q_lora_rank", "")
    more: Knobs = {
        "attention.q_lora_rank": 0 if rank is None else number(config, "q_lora_rank"),
        "moe.shared_ffn": number(config, "n_shared_experts") * knobs["moe.ffn"],
    }
    per_sequence = config.get("seq_aux", True)
    if type(per_sequence) is not bool:
        raise ConversionError(f"config.json has seq_aux={shown(per_sequence)}; expected bool")
    if "aux_loss_alpha" in config:
        alpha = value_of(config, "aux_loss_alpha", "moe.router.aux_loss")
        more["moe.router.seq_aux_loss"] = alpha if per_sequence else 0.0
        more["moe.router.aux_loss"] = 0.0 if per_sequence else alpha
    return more


def _windows(config: Fields, layers: int) -> Knobs:
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    if kinds is None:
        kinds = kinds_of_layers(layers, 2, windows=True)
    if not isinstance(kinds, list):
        raise ConversionError(f"config.json has layer_types={shown(kinds)}; expected a list")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise ConversionError(
                f"config.json has {shown(kind)} in layer_types; {FULL} and {SLIDING} are known"
            )
    if kinds == [FULL] * layers:
        return {"attention.window": 0, "attention.window_every": 1}
    every = kinds.index(FULL) + 1 if FULL in kinds else 1
    if kinds != kinds_of_layers(layers, every, windows=True):
        raise ConversionError("config.json has layer_types that are not full at each n-th layer")
    if type(window) is not int or window < 1:
        raise ConversionError(
            f"config.json has sliding_window={shown(window)} and sliding layers; expected a number"
        )
    return {"attention.window": window, "attention.window_every": every}


def _full_attention_interval(config: Fields, knobs: Knobs) -> int:
    """Interval of layers with full attention, from `layer_types` or `full_attention_interval`."""
    layers, kinds = knobs["layers"], config.get("layer_types")
    interval = number(config, "full_attention_interval", 4, least=1)
    if kinds is None:
        return interval
    if not isinstance(kinds, list) or any(kind not in (FULL, LINEAR) for kind in kinds):
        known = f"expected a list of {FULL} and {LINEAR}"
        raise ConversionError(f"config.json has layer_types={shown(kinds)}; {known}")
    every = kinds.index(FULL) + 1 if FULL in kinds else max(interval, layers + 1)
    if kinds != linear_kinds(layers, every):
        raise ConversionError("config.json has layer_types that are not full at each n-th layer")
    if "full_attention_interval" in config and linear_kinds(layers, interval) != kinds:
        raise ConversionError(
            f"config.json has full_attention_interval={interval} and layer_types that differ"
        )
    return every


def linear_kinds(layers: int, every: int) -> list[str]:
    """`layer_types` with each `every`-th layer full, the others linear."""
    return [LINEAR if i % every else FULL for i in range(1, layers + 1)]


def kinds_of_layers(layers: int, every: int, *, windows: bool) -> list[str]:
    """`layer_types` with each `every`-th layer full; all without windows, none if it is 1."""
    full = [not windows or (every > 1 and i % every == 0) for i in range(1, layers + 1)]
    return [FULL if each else SLIDING for each in full]


def _aux_loss(config: Fields) -> Knobs:
    if "router_aux_loss_coef" not in config:
        return {}
    coefficient = value_of(config, "router_aux_loss_coef", "moe.router.aux_loss")
    return {"moe.router.aux_loss": coefficient, "moe.router.seq_aux_loss": 0.0}


def _check_heads(knobs: Knobs) -> None:
    heads, shared = knobs["attention.heads"], knobs["attention.kv_heads"]
    if shared < 1 or heads % shared:
        raise ConversionError(
            f"config.json has num_key_value_heads={shared}, which does not divide "
            f"num_attention_heads={heads}"
        )


def check_one_expert(knobs: Knobs) -> None:
    """Refuse one expert per token of normalized weight: always 1, so no router learns."""
    if "moe.top_k" not in knobs:  # a dense model
        return
    over_top_k = knobs.get("moe.router.softmax_over") == "topk"
    if knobs["moe.top_k"] == 1 and (over_top_k or knobs["moe.router.normalize"]):
        why = "softmax over one expert" if over_top_k else "norm_topk_prob=true"
        raise ConversionError(
            f"config.json has num_experts_per_tok=1 with {why}, a weight that is always 1, so that "
            "the router does not learn; this is not supported"
        )


def check_groups(top_k: int, groups: int, group_topk: int) -> None:
    """Refuse groups that are ranked differently.

    Hugging Face ranks them by their best two experts, Phalanx by their best top_k / group_topk.
    """
    if group_topk < groups and top_k != 2 * group_topk:
        raise ConversionError(
            f"top_k={top_k} with group_topk={group_topk} cannot be converted: Hugging Face ranks "
            "groups by their best two experts, Phalanx by their best top_k / group_topk"
        )


def check_quantised(config: Fields) -> None:
    """Check that `hf.source`, which checks block sizes, reads the quantized format."""
    stored = config.inner("quantization_config")
    if stored is None:
        return
    method = stored.get("quant_method")
    if method not in ("fp8", "mxfp4"):
        raise ConversionError(f"{stored.where} has quant_method={shown(method)}, not fp8 or mxfp4")
    harmless = {"modules_to_not_convert", "ignored_layers", "dequantize"}
    if method == "fp8":
        if stored.get("fmt") != "float8_e4m3fn":  # torch's name of it
            stored.demand({"fmt": "e4m3"})
        stored.demand({"expert_dtype": "fp8"})
        harmless |= {"activation_scheme", "scale_fmt", "weight_block_size"}
    stored.refuse_unread(frozenset(harmless))
