"""The release of Megatron-Core, and its first import, without what else it does to the process."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from importlib import metadata
from types import FunctionType
from typing import Any

MEGATRON_CORE = "0.19.2"  # version that pyproject.toml pins


def check_version() -> None:
    """Raise ValueError for another installed release, before it is imported."""
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return
    if found != MEGATRON_CORE:
        raise ValueError(
            f"megatron-core {found} is installed, but its parts that are patched here are those of "
            f"{MEGATRON_CORE}: pip install megatron-core=={MEGATRON_CORE}"
        )


@contextmanager
def compile_at_first_call() -> Iterator[None]:
    """Inside, torch.compile leaves a function as it is until somebody calls what it returned.

    Megatron-Core decorates a dozen functions at its import, most of which are never called here; to
    decorate one imports TorchDynamo, TorchInductor and SymPy, a fifth of the import time of a rank.
    Modules are compiled at once.
    """
    import torch

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


_UNUSED = ("wandb", "torch.utils.tensorboard", "flash_attn", "boto3")
"""Packages that Megatron-Core imports for unused parts: its timers, its attention (which would
import CuTe DSL, QuACK and TorchDynamo on a CPU too), and its access to object stores."""


@contextmanager
def importing_megatron() -> Iterator[None]:
    """Inside, nothing is compiled at import; after, the root logger has the handlers it had.

    Optional packages for unused parts are not imported, which is half of the time otherwise.
    emerging-optimizers logs by absl, which gives a root logger without handlers one that writes to
    stderr: our warnings would go there once more.
    """
    handlers = list(logging.root.handlers)
    try:
        with compile_at_first_call(), without(*_UNUSED):
            yield
    finally:
        logging.root.handlers[:] = handlers


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Inside, these modules cannot be imported, also if they are already."""
    present = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(present)
