"""torch.compile that compiles, and imports its compiler, at the first call.

Megatron-Core decorates a dozen functions with torch.compile when it is imported. Most are never
called here, and to decorate one imports TorchDynamo, TorchInductor and SymPy: a fifth of the time
that a rank takes to import everything.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch


@contextmanager
def compile_at_first_call() -> Iterator[None]:
    """Inside, torch.compile leaves a function as it is until somebody calls what it returned.

    Modules are compiled at once, as always.
    """
    at_once = torch.compile

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return partial(compile, **options)
        if not isinstance(model, FunctionType):
            return at_once(model, **options)
        return _compiled_later(model, partial(at_once, **options))

    torch.compile = compile
    try:
        yield
    finally:
        torch.compile = at_once


def _compiled_later(
    function: Callable[..., Any], compiler: Callable[..., Callable[..., Any]]
) -> Callable[..., Any]:
    compiled: Callable[..., Any] | None = None

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = compiler(function)
        return compiled(*args, **kwargs)

    return call
