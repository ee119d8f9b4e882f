"""Triton kernels on CPU tensors: run by Triton's interpreter, which a process has or has not.

One such process serves all modules of a session's process; what they import takes seconds.
"""

import functools
import importlib
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


def interpret(module: str) -> None:
    """Call `interpreted` of a test module there, and raise what it raises.

    Args:
        module: `__name__` of the caller.
    """
    _process().submit(_call, module).result(timeout=100)


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported


def _call(module: str) -> None:
    importlib.import_module(module).interpreted()
