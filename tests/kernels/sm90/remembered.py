"""Facts about compiled kernels, cached on disk for as long as they would be compiled the same.

A kernel takes seconds to compile, disassemble and load, and seldom changes. An entry's name holds
all that the result depends on: the sources that kernels are traced from, the kernel, its
configuration, the compiler and its options, the tools and the tests that read the code. Whoever
changes one of them gets a new entry; `PHALANX_TEST_KERNELS` names another folder, for instance an
empty one.
"""

import inspect
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from phalanx.kernels.cache import Cache, digest_of, name_of
from phalanx.kernels.sm90.jit.launch import entry_name

VARIABLE = "PHALANX_TEST_KERNELS"
_OWN = (Path(__file__), Path(__file__).with_name("sass.py"))
_SETTINGS = "CUTE_DSL_"
_NOT_SETTINGS = ("CUTE_DSL_LIBS",)
"""The runtime that a compiled kernel is launched by."""


def cache() -> Cache:
    """The entries of this machine."""
    chosen = os.environ.get(VARIABLE)
    return Cache(Path(chosen or "~/.cache/phalanx/test_kernels").expanduser())


def name(kernel: type, config: Any, made_by: Sequence[str | Path]) -> str:
    """Name of the entry of a kernel.

    Args:
        made_by: whatever else it depends on: options, and paths of sources and programs.
    """
    source = Path(inspect.getsourcefile(kernel) or "")
    own = [entry_name(kernel, config), digest_of([source, *_OWN])]
    return named(kernel.__name__, [*own, *made_by])


def named(label: str, made_by: Sequence[str | Path]) -> str:
    """Name of an entry of anything else that is compiled; `made_by` is all that it depends on but
    versions of Python, CUDA's bindings and torch, and settings of CuTe DSL."""
    return name_of(
        label,
        *map(_fact, made_by),
        *(platform.python_version(), version("cuda-bindings"), version("torch")),
        *sorted(f"{k}={v}" for k, v in os.environ.items() if _is_setting(k)),
    )


def fetch(
    kernel: type, config: Any, made_by: Sequence[str | Path], make: Callable[[], bytes]
) -> bytes:
    """The entry, or what `make` returns, which is then kept. What `make` raises is not."""
    return cache().fetch(name(kernel, config, made_by), make)


def _fact(what: str | Path) -> str:
    if isinstance(what, str):
        return what
    if what.suffix:
        return digest_of([what])
    facts = what.stat()  # a program of many megabytes
    return f"{what.name} {facts.st_size} {facts.st_mtime_ns}"


def _is_setting(variable: str) -> bool:
    return variable.startswith(_SETTINGS) and variable not in _NOT_SETTINGS
