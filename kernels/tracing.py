"""Marks of functions for torch.compile, without an import of it, and the recorder of launches.

`torch.compiler.assume_constant_result` and `torch.compiler.disable` import torch._dynamo and sympy,
which takes seconds and which a process that compiles nothing does not need.
"""

import threading
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


LOCAL = threading.local()  # backward passes have threads of their own


def recorder() -> Any:
    """The `kernels.tape.Recorder` of this thread, which launchers tell what they do, or None."""
    return getattr(LOCAL, "recorder", None)


def step(action: Callable[[], None]) -> None:
    """Do something that has no tensors, as waiting for an event, and record it."""
    action()
    if (recording := recorder()) is not None:
        recording.add(lambda addresses, tensors: action())
