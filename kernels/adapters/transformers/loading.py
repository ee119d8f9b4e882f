"""Preparation of models where transformers has loaded or made them."""

import functools
from collections.abc import Callable
from typing import Any

from phalanx.adapters.transformers.experts import prepare


def prepared(build: Callable[..., Any]) -> Any:
    """A class method of `PreTrainedModel` that builds a model, and then prepares its experts.

    Args:
        build: the bound class method, which returns a model, or a tuple that begins with one.
    """
    original = build.__func__  # type: ignore[attr-defined]

    @functools.wraps(original)
    def wrapper(cls: type, *args: Any, **kwargs: Any) -> Any:
        built = original(cls, *args, **kwargs)
        prepare(built[0] if isinstance(built, tuple) else built)
        return built

    return classmethod(wrapper)
