"""The first import of Megatron-Core, without what it does to the process besides."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.parallel.megatron.lazy_compile import compile_at_first_call


@contextmanager
def importing_megatron() -> Iterator[None]:
    """Inside, nothing is compiled at import; after, the root logger has the handlers it had.

    Megatron-Core lists emerging-optimizers where that is installed, which logs by absl, which gives
    a root logger without handlers one that writes to stderr: our warnings would go there once more.
    """
    handlers = list(logging.root.handlers)
    try:
        with compile_at_first_call():
            yield
    finally:
        logging.root.handlers[:] = handlers
