"""The fields of `model.attention.sparse`, with their defaults: those of DeepSeek-V3.2."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

PHASES = ("warm_up", "sparse")


@dataclass(frozen=True)
class SparseOptions:
    """Keys of a query that an indexer chooses (arXiv 2512.02556)."""

    heads: int = 64  # query heads of the indexer; all share one key
    dim: int = 128  # channels of its heads, of which the first `qk_rope_dim` are rotated
    top_k: int = 2048  # keys that a query attends to
    interleaved: bool = False  # rotated pairs are adjacent channels, as in GLM-5
    phase: str = "sparse"  # or `warm_up`: attention sees all keys, and the indexer alone learns
    loss: float = 1.0  # coefficient of the indexer's loss

    @property
    def warms_up(self) -> bool:
        return self.phase == "warm_up"


KINDS: dict[str, type] = {f.name: type(f.default) for f in fields(SparseOptions)}
"""Type of each field."""


def understood(given: Mapping[str, Any]) -> SparseOptions:
    """Options of a knob's value whose names and types `problems` has checked."""
    return SparseOptions(**given)


def problems(given: Mapping[str, Any], rotated: int) -> dict[str, tuple[str, Any]]:
    """Mistakes of fields, each with a value in its place; None leaves the field out.

    The indexer rotates `rotated` channels of a head.
    """
    found: dict[str, tuple[str, Any]] = {}
    least = {"heads": 1, "dim": rotated, "top_k": 1, "loss": 0}
    for name, value in given.items():
        kind = KINDS.get(name)
        if kind is None:
            found[name] = f"is no field; the fields are {', '.join(KINDS)}", None
        elif type(value) is not kind and (kind, type(value)) != (float, int):
            found[name] = f"is not of type {kind.__name__}", getattr(SparseOptions, name)
        elif name in least and not value >= least[name]:
            why = " (model.attention.qk_rope_dim)" * (name == "dim")
            found[name] = f"must be at least {least[name]}{why}", max(1, least[name])
        elif name == "loss" and value == float("inf"):
            found[name] = "must be finite", 1.0
        elif name == "phase" and value not in PHASES:
            found[name] = f"is not one of {', '.join(PHASES)}", "sparse"
    return found
