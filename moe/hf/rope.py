"""The rotary embedding in a config.json and in the knobs, with YaRN (arXiv 2309.00071) or without.

transformers 5 writes `rope_parameters`; versions before it, and published folders, `rope_theta` and
`rope_scaling`. Both are read. Written is what every version reads alike: `rope_scaling` for YaRN,
and without it `rope_parameters` that say so, as silence is YaRN for some models.
"""

import math
from dataclasses import dataclass
from typing import Any

from phalanx.configs.schema import YarnConfig
from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.fields import Fields, number, shown, value_of

_CONTEXT = "original_max_position_embeddings"
_PLACES = ("rope_parameters", "rope_scaling")


@dataclass(frozen=True)
class Heads:
    """What a family rotates."""

    latent: bool = False
    """It has latent attention."""
    silence: bool = True
    """A config.json that has neither `rope_parameters` nor `rope_scaling` means no YaRN."""
    channels: int = 0
    """Of a head, in families that may rotate some of them; 0 for families that rotate all."""
    share: float = 1.0
    """Of these, rotated where nothing says so."""


def from_rope(config: Fields, heads: Heads) -> dict[str, Any]:
    """Knobs below `model.` that a config.json sets.

    Args:
        config: of Hugging Face.
        heads: what the family rotates.

    Raises:
        ConversionError: the embedding has no counterpart here, or can be read in two ways.
    """
    given = {place: rope for place in _PLACES if (rope := config.inner(place)) is not None}
    if not given and not heads.silence:
        raise ConversionError(
            f"{config.where} has neither rope_parameters nor rope_scaling, which some versions of "
            'transformers read as YaRN: write "rope_parameters": {"rope_type": "default", '
            '"rope_theta": ...}, or those of YaRN'
        )
    readings = [_read(rope, config, heads) for rope in given.values()]
    if len(readings) > 1 and readings[0] != readings[1]:
        raise ConversionError(f"{config.where} has rope_parameters and rope_scaling that differ")
    return readings[0] if readings else _read(Fields({}, config.where), config, heads)


def _read(rope: Fields, config: Fields, heads: Heads) -> dict[str, Any]:
    """Knobs of one of the two places."""
    kind = rope.one("rope_type", "type") or "default"
    thetas = [holder for holder in (rope, config) if "rope_theta" in holder] or [config]
    found = [value_of(holder, "rope_theta", "attention.rope_theta") for holder in thetas]
    theta = found[0]
    if found[-1] != theta:
        raise ConversionError(
            f"{config.where} has rope_theta={found[-1]}, and {theta} in {rope.where}"
        )
    if theta % 1:
        raise ConversionError(f"{config.where} has a rope_theta that is no whole number")
    rotated = _rotated(rope, config, heads)
    if kind not in ("default", "yarn"):
        raise ConversionError(
            f"{rope.where} has rope_type={shown(kind)}; default and yarn are known"
        )
    values: dict[str, Any] = {"factor": 1.0}
    if kind == "yarn":
        values = vars(_yarn(rope, heads.latent))
        if rotated.get("attention.rotary_dim"):
            raise ConversionError(f"{rope.where} has YaRN over a part of each head; there is none")
    rope.refuse_unread()
    yarn = {f"attention.yarn.{name}": value for name, value in values.items()}
    return {"attention.rope_theta": theta, **yarn, **rotated}


def _rotated(rope: Fields, config: Fields, heads: Heads) -> dict[str, Any]:
    """Channels of a head that are rotated, by one of three fields."""
    if not heads.channels:
        rope.demand({"partial_rotary_factor": 1.0})
        return {}
    told: dict[str, int] = {}
    for holder in (rope, config):
        if holder.get("partial_rotary_factor") is not None:
            share = value_of(holder, "partial_rotary_factor", "attention.rope_theta")
            told[f"partial_rotary_factor={share} in {holder.where}"] = int(heads.channels * share)
    if config.get("rotary_dim") is not None:
        told["rotary_dim"] = number(config, "rotary_dim", least=1)
    if len(set(told.values())) > 1:
        raise ConversionError(f"{config.where} has {' and '.join(told)}, which differ")
    dim = next(iter(told.values()), int(heads.channels * heads.share))
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
            f"{rope.where} has truncate=false, which latent attention has not here"
        )
    if rope.get("attention_factor") is not None:
        given = value_of(rope, "attention_factor", "attention.yarn.factor")
    else:
        # transformers reads mscale and mscale_all_dim only where both are there.
        both = rope.get("mscale") and rope.get("mscale_all_dim")
        given = _temperature(yarn) if both else _temperature(YarnConfig(factor=yarn.factor))
    if not math.isclose(given, _temperature(yarn), rel_tol=1e-6):
        raise ConversionError(
            f"{rope.where} has attention_factor={given}; here it would be {_temperature(yarn)}"
        )
    return yarn


def rotated_share(dim: int, channels: int) -> float:
    """`partial_rotary_factor` of `dim` channels, of which transformers takes int(channels * it)."""
    share = dim / channels
    return share if int(channels * share) == dim else math.nextafter(share, 1.0)


def to_rope(theta: float, yarn: YarnConfig, share: float | None = None) -> dict[str, Any]:
    """The fields of a config.json that tell of the rotary embedding.

    Args:
        theta: its base.
        yarn: its extension.
        share: of the channels of a head, where the family has a choice.
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
