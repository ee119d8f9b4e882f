"""The recorder of launches of this thread, which launchers tell what they do (`kernels.tape`)."""

import threading
from collections.abc import Callable
from typing import Any

LOCAL = threading.local()  # backward passes have threads of their own


def recorder() -> Any:
    """The `kernels.tape.Recorder` of this thread, or None."""
    return getattr(LOCAL, "recorder", None)


def step(action: Callable[[], None]) -> None:
    """Do something that has no tensors, as waiting for an event, and record it."""
    action()
    if (recording := recorder()) is not None:
        recording.add(lambda addresses, tensors: action())
