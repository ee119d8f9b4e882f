"""The rotary embedding in a config.json and in the knobs, with YaRN (arXiv 2309.00071) or without.

transformers 5 writes `rope_parameters`; older versions, and published folders, have `rope_theta`
and `rope_scaling`. Both are read. An export writes fields that every version reads the same way:
`rope_scaling` for YaRN, else explicit `rope_parameters`, as the default is YaRN for some models.
"""

import math
from dataclasses import dataclass
from typing import Any

from phalanx.configs.schema import YarnConfig
from phalanx.moe.data.tokenizer.special_tokens import shown
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.fields import Fields, number, value_of

_CONTEXT = "original_max_position_embeddings"
_FIELDS = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Heads:
    """Rotated heads of a family."""

    latent: bool = False
    """Latent attention."""
    silence: bool = True
    """True if a config.json with neither `rope_parameters` nor `rope_scaling` means no YaRN."""
    channels: int = 0
    """Channels of a head, in families that may rotate some of them; 0 if they rotate all."""
    share: float = 1.0
    """Default fraction of these that is rotated."""


def from_rope(config: Fields, heads: Heads) -> dict[str, Any]:
    """Knobs below `model.` of the rotary embedding in a config.json.

    Args:
        config: of Hugging Face.
        heads: rotated heads of the family.

    Raises:
        ConversionError: the embedding has no counterpart here, or is ambiguous.
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
    """Knobs of one of the two fields."""
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
    """Rotated channels of a head, from one of three fields."""
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
    """Fields of a config.json for the rotary embedding.

    Args:
        theta: base of its frequencies.
        yarn: context extension.
        share: rotated fraction of a head, if the family has a choice.
    """
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
