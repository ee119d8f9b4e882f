"""Preparation of models where transformers makes or loads them, or changes their experts."""

import functools
from collections.abc import Callable
from typing import Any

from phalanx.adapters.transformers.coverage import warn_unreached
from phalanx.adapters.transformers.modules import NAME, prepare


def prepared(build: Callable[..., Any]) -> Any:
    """A class method of `PreTrainedModel` that builds a model, and then prepares its experts.

    Args:
        build: the bound class method, which returns a model, or a tuple that begins with one.
    """
    original = build.__func__  # type: ignore[attr-defined]

    @functools.wraps(original)
    def wrapper(cls: type, *args: Any, **kwargs: Any) -> Any:
        built = original(cls, *args, **kwargs)
        model = built[0] if isinstance(built, tuple) else built
        prepare(model)
        warn_unreached(model)  # again: a quantizer replaces modules
        return built

    return classmethod(wrapper)


def warned(post_init: Callable[..., None]) -> Any:
    """`PreTrainedModel.post_init`, the end of a constructor, with a warning of experts without."""

    @functools.wraps(post_init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        post_init(self, *args, **kwargs)
        warn_unreached(self)

    return wrapper


def chosen(choose: Callable[..., None]) -> Any:
    """`PreTrainedModel.set_experts_implementation`, which then prepares the experts."""

    @functools.wraps(choose)
    def wrapper(self: Any, experts_implementation: Any) -> None:
        choose(self, experts_implementation)
        prepare(self)
        names = experts_implementation
        asked = NAME in (names.values() if isinstance(names, dict) else [names])
        # transformers leaves the config of a model without dispatched experts as it was.
        warn_unreached(self, asked=asked)

    return wrapper
