"""Models of transformers whose file takes flash-linear-attention where that can be imported."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_fla() -> Iterator[None]:
    """Inside, a model's file that is imported takes plain PyTorch: the package needs a GPU."""
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "fla"}
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["fla"]
        sys.modules.update(before)
