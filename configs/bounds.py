"""Checks of each knob by the facts of its field: choices of strings, bounds of numbers."""

import difflib
import math
from collections.abc import Iterator
from typing import Any

from phalanx.configs.knobs import Knob, get, knobs, repair, values, visible
from phalanx.configs.schema import Config

_MOST = 2**31 - 1
"""Upper bound of every integer: no size is near it, and seeds and shapes in libraries end there."""
_SWITCHED = {"true": "on", "yes": "on", "false": "off", "no": "off", "gpu": "cuda"}
"""Names of values by other words for them."""


def choices() -> dict[str, tuple[str, ...]]:
    """Valid strings of every knob that has a list of them."""
    return {path: names for path, knob in knobs().items() if (names := knob.facts.strings)}


def oversized(cfg: Config) -> list[str]:
    """Sizes beyond those of every published model: what to lower, a line each."""
    return [
        f"{path}={get(cfg, path)}: lower it, published models have at most {most:,}"
        for path, knob in knobs().items()
        if (most := knob.facts.largest_published) is not None and get(cfg, path) > most
    ]


def bound_problems(cfg: Config) -> Iterator[str]:
    """Knobs that are wrong by themselves."""
    for path, value in values(cfg):
        known = isinstance(value, str | int | float) and (path, type(value), value)
        if known in _FINE:
            continue
        knob = knobs()[path]
        allowed = knob.facts.strings
        if isinstance(value, list) and allowed:
            if wrong := [item for item in value if item not in allowed]:
                left = [item for item in value if item in allowed]
                near = difflib.get_close_matches(str(wrong[0]), allowed, n=1)
                reason = f"has {visible(str(wrong[0]))!r}, none of {', '.join(allowed)}"
                yield repair(cfg, path, reason, list(dict.fromkeys(left + near)))
        elif isinstance(value, str):
            if allowed and value not in allowed:
                meant = _meant(value, allowed, is_switch=knob.type == bool | str)
                others = {int | str: ", and no number", bool | str: ", true or false"}
                reason = f"is not one of {', '.join(allowed)}{others.get(knob.type, '')}"
                yield repair(cfg, path, reason, meant)
        elif knob.type in (int, float, int | str) and (bound := _bound(knob, value)):
            yield repair(cfg, path, *bound)
        elif known and not isinstance(value, str):
            _FINE.add(known)


_FINE: set[object] = set()
"""Knobs with numbers that were found to be valid: a search validates the same ones all the time."""


def _meant(value: str, names: tuple[str, ...], *, is_switch: bool) -> str | bool:
    word = _SWITCHED.get(value.lower(), value.lower())
    near = [name for name in names if name.lower() == word]
    if not near and is_switch and word in ("on", "off"):
        return word == "on"
    if word == "on":  # of a choice with a name for what is on
        near += [name for name in names if name not in ("auto", "off")]
    near += [name for name in names if name.startswith(word)]
    near += difflib.get_close_matches(word, names, n=1, cutoff=0.3)
    return (near or names)[0]


def _bound(knob: Knob, value: float) -> tuple[str, Any] | None:
    default, facts = knob.default, knob.facts
    if knob.type is not float:
        if value > _MOST:
            return f"must be at most {_MOST}", default
        value = max(value, -_MOST)  # no float holds some whole numbers
    if not math.isfinite(value):
        return "must be finite", default
    if facts.above_zero:
        return None if value > 0 else ("must be above 0", default)
    if facts.below_one and value >= 1:
        return "must be below 1", default
    if value >= facts.at_least:
        return None
    nearest = facts.at_least if default == "auto" else max(facts.at_least, default)
    return f"must be at least {facts.at_least}", nearest
