"""Custom ops of torch that cost little time of the host.

`torch.library.custom_op` checks in every call that no output is an argument, and its first call
imports torch._dynamo, which takes seconds. An op of this file does neither.
"""

from collections.abc import Callable
from typing import Any

import torch

# A copy of this package that is imported by another name than `phalanx` has ops of its own.
_LIBRARY = torch.library.Library(__name__.partition(".")[0], "FRAGMENT")
OPS: dict[str, "CustomOp"] = {}  # by name: `phalanx::plan`


class CustomOp:
    """Op `phalanx::<name>`.

    Args:
        name: of the op.
        compute: implementation on all devices. It changes none of its arguments, and its outputs
            share no memory with them or with each other.
    """

    def __init__(self, name: str, compute: Callable[..., Any]) -> None:
        self._name, self.compute = f"{_LIBRARY.ns}::{name}", compute
        OPS[self._name] = self
        schema = torch.library.infer_schema(compute, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
        self.overload = getattr(getattr(torch.ops, _LIBRARY.ns), name).default

    def __call__(self, *args: Any) -> Any:
        return self.overload(*args)

    def register_fake(self, compute: Callable[..., Any]) -> None:
        """Register a decorated function that makes outputs of the right shapes, without data."""
        torch.library.register_fake(self._name, compute, lib=_LIBRARY)

    def register_autograd(
        self, backward: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        """As `torch.library.register_autograd`."""
        torch.library.register_autograd(
            self._name, backward, setup_context=setup_context, lib=_LIBRARY
        )


def custom_op(name: str) -> Callable[[Callable[..., Any]], CustomOp]:
    """A decorator that makes a function a `CustomOp`."""
    return lambda compute: CustomOp(name, compute)
