"""Axes of a `jax.shard_map` over which arrays differ, which operations on them must agree on."""

from collections.abc import Sequence
from typing import Any

import jax


def vary_alike(arrays: Sequence[Any], like: Sequence[Any] = ()) -> list[Any]:
    """The arrays, made to vary over each axis that one of them, or of `like`, varies over.

    The gradient of one that did not vary is then the sum over the axis. None stays None.
    """
    axes = {axis for x in (*arrays, *like) if x is not None for axis in _axes(x)}
    return [x if x is None else _vary(x, axes) for x in arrays]


def _vary(x: Any, axes: set[Any]) -> Any:
    missing = tuple(axes - _axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def _axes(x: Any) -> frozenset[Any]:
    return frozenset(jax.typeof(x).manual_axis_type.varying)  # `vma` before jax 0.11
