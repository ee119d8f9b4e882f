"""The knobs of a checkpoint's configuration, as this version understands them.

What weights, their numbers and their text depend on has to be understood: a knob of these sections
that this version does not know, or whose value is of another type, is refused by name. Others are
left out, and told, as are knobs that were removed (unless their value asked for what is always done
now). Imports neither torch nor YAML.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any

from phalanx.configs.knobs import REMOVED, has_fields, knobs, renamed, visible

_NEEDED = ("model.", "precision.", "data.")  # sections that have to be understood
_FEW = 8  # knobs that a person reads one by one


class CheckpointMismatch(ValueError):
    """The checkpoint is not of the same model or data as this run, or not of this version."""


@dataclass(frozen=True)
class SavedKnobs:
    """A configuration that is understood."""

    values: dict[str, Any]  # values keyed by dotted path, under present names
    ignored: tuple[str, ...]  # unknown paths, in sections without which it can do
    removed: tuple[tuple[str, Any], ...] = ()
    """Removed knobs, with values that asked for what is done no more."""

    def ignored_note(self) -> str:
        notes = [
            visible(f"{path}={shown(value)} no longer exists, as {REMOVED[path].always}")
            for path, value in self.removed
        ]
        if self.ignored:
            unknown_knobs = _listed(self.ignored)
            notes.append(f"knobs that this version does not know are ignored: {unknown_knobs}")
        return "; ".join(notes)


def understood(config: Any) -> SavedKnobs:
    """The knobs of a checkpoint's nested configuration, which may have `model` alone.

    Raises CheckpointMismatch, one line, for a knob of `model`, `precision` or `data` that is not
    understood.
    """
    if not isinstance(config, dict):
        raise CheckpointMismatch("the checkpoint has no configuration")
    values: dict[str, Any] = {}
    ignored, refused, removed = list[str](), list[str](), list[tuple[str, Any]]()
    for name, value in leaves(config):
        path = _present(name)
        if _known(path, value):
            values[path] = value
        elif path in REMOVED:
            if value != REMOVED[path].value:
                removed.append((path, value))
        elif f"{path}.".startswith(_NEEDED):
            refused.append(visible(f"{path}={shown(value)}"))
        else:
            ignored.append(visible(path))
    if refused:
        raise CheckpointMismatch(
            f"the checkpoint has {_listed(refused)}, which this version does not know: use the "
            "version that wrote it, or a newer one"
        )
    return SavedKnobs(values, tuple(ignored), tuple(removed))


def unknown(config: dict[str, Any]) -> set[str]:
    """Paths, as they were saved, that this version does not know or has another type for."""
    return {
        name
        for name, value in leaves(config)
        if not _known(_present(name), value)
        and not (name in REMOVED and value == REMOVED[name].value)
    }


def leaves(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every knob."""
    for key, value in config.items():
        if isinstance(value, dict) and not has_fields(f"{prefix}{key}"):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def shown(value: Any) -> str:
    """A value as users read it."""
    return value if isinstance(value, str) and value else json.dumps(value)


def _present(path: str) -> str:
    return renamed()[path].path if path in renamed() else path


def _known(path: str, value: Any) -> bool:
    return path in knobs() and _fits(value, knobs()[path].type)


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    if isinstance(kind, UnionType):
        return type(value) in kind.__args__
    return type(value) is kind if isinstance(kind, type) else isinstance(value, list | dict)


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = [f"{len(names) - _FEW} more"] if len(names) > _FEW else []
    return ", ".join([*names[:_FEW], *more])
