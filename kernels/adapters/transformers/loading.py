"""Preparation of models where transformers makes or loads them, or changes their experts.

transformers takes the name of an implementation for every model, and computes experts of a class
without its decorator as ever. Those are found by the names of modules and classes, for a warning.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from phalanx.adapters.transformers.modules import NAME, is_dispatched, prepare


def prepared(build: Callable[..., Any]) -> Any:
    """A class method of `PreTrainedModel` that builds a model, and then prepares its experts.

    `build` is bound, and returns a model, or a tuple that begins with one.
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


_EXPERTS = re.compile(r"((?<!Shared)Experts|Mo[eE](Block)?|MoA|SparseMLP)$")
"""Ends of names of classes; shared experts are dense."""


def warn_unreached(model: nn.Module, *, asked: bool = False) -> None:
    """Warn of experts for which this implementation is asked and that it does not reach.

    `asked`: it is asked for everywhere, not where configs say so.
    """
    if names := sorted(set(unreached(model, asked=asked))):
        warnings.warn(
            f"{', '.join(names)}: transformers does not dispatch these experts, so they are its "
            f"own: experts_implementation={NAME!r} has no effect on them",
            stacklevel=2,
        )


def unreached(model: nn.Module, *, asked: bool = False) -> Iterator[str]:
    """Classes of the innermost modules with experts that this implementation does not reach."""
    return _unreached(model, "", type(model).__name__, asked)


def _unreached(module: nn.Module, name: str, owner: str, asked: bool) -> Iterator[str]:
    if isinstance(module, PreTrainedModel):
        asked = asked or module.config._experts_implementation == NAME
    if is_dispatched(module):
        return
    kind = type(module).__name__
    own = owner if kind in ("ModuleList", "ModuleDict") else kind
    inner = [k for n, child in module.named_children() for k in _unreached(child, n, own, asked)]
    yield from inner
    has_experts = name == "experts" or _EXPERTS.search(kind)
    if asked and not inner and has_experts and not any(map(is_dispatched, module.modules())):
        yield own
