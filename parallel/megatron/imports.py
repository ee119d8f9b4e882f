"""The first import of Megatron-Core, without what it does to the process besides."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def gated_delta_net() -> Any:
    """Megatron-Core's package `ssm.gated_delta_net`, without flash-linear-attention.

    It imports the library on any device, which takes seconds, and its layers insist on it when they
    are built; `moe.model.gated_delta_net` computes between their projections itself.
    """
    name = "fla"
    there = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        from megatron.core.ssm import gated_delta_net
    finally:
        del sys.modules[name]
        if there is not None:
            sys.modules[name] = there
    gated_delta_net.common.HAVE_FLA = True
    return gated_delta_net
