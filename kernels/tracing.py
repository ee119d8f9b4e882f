"""Marks of functions for torch.compile, which do not import the compiler.

`torch.compiler.assume_constant_result` and `torch.compiler.disable` import torch._dynamo and sympy,
which takes seconds and which a process that compiles nothing does not need.
"""

from collections.abc import Callable
from typing import Any, cast

import torch


def constant_in_graphs[F: Callable[..., Any]](fn: F) -> F:
    """`torch.compiler.assume_constant_result`."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def outside_graphs[F: Callable[..., Any]](fn: F) -> F:
    """`torch.compiler.disable`, which imports the compiler in the first call of `fn`."""
    return cast(F, torch._disable_dynamo(fn))
