"""Experts that no implementation reaches, because transformers does not dispatch them.

transformers takes the name of an implementation for every model, and computes experts of a class
without its decorator as ever. They are found by the names of modules and classes.
"""

import re
import warnings
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from phalanx.adapters.transformers.modules import NAME, is_dispatched

_EXPERTS = re.compile(r"((?<!Shared)Experts|Mo[eE](Block)?|MoA|SparseMLP)$")
"""Ends of the names of classes with experts; shared experts are dense."""


def warn_unreached(model: nn.Module, *, asked: bool = False) -> None:
    """Warn of experts for which this implementation is asked and that it does not reach.

    Args:
        model: a model of transformers, or a part of one.
        asked: the implementation is asked for everywhere, not where configs say so.
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
