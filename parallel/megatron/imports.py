"""The first import of Megatron-Core, without what it does to the process besides."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.parallel.megatron.lazy_compile import compile_at_first_call

_UNUSED = ("wandb", "torch.utils.tensorboard", "flash_attn", "boto3")
"""Optional packages that Megatron-Core imports for parts of it which are not used here: its timers,
its attention (which would import CuTe DSL, QuACK and TorchDynamo on a CPU too), and its access to
object stores."""


@contextmanager
def importing_megatron() -> Iterator[None]:
    """Inside, nothing is compiled at import; after, the root logger has the handlers it had.

    Optional packages for parts of Megatron-Core that are not used are not imported, which is half
    of the time otherwise.

    Megatron-Core lists emerging-optimizers where that is installed, which logs by absl, which gives
    a root logger without handlers one that writes to stderr: our warnings would go there once more.
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
