"""Kernels that libraries compile with CuTe DSL, as entries of `kernels.cache`.

Exported kernels have a host function for this processor, which the names of entries hold too.
"""

import contextlib
import functools
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from phalanx.kernels.cache import name_of

ARCH = "sm_90a"
_PACKAGES = ("flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")
_SYMBOL = "attention"  # name of the function in every object; existing entries have it too


def entry_name(label: str, key: Any) -> str:
    """Name of a kernel in a `Cache`: it changes with everything that its object depends on."""
    return name_of(
        label,
        *(ARCH, *_host(), f"python {sys.version_info.major}.{sys.version_info.minor}"),
        *(f"{package} {version(package)}" for package in _PACKAGES),
        repr(key),
    )


def exported(function: Any) -> bytes:
    """The object file of a function that the library compiled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        function.export_to_c(object_file_path=str(path), function_name=_SYMBOL)
        return path.read_bytes()


def loaded(data: bytes) -> Any:
    """The function in an object of `exported`; needs no GPU."""
    from cutlass.cute.runtime import load_module

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(data)
        return getattr(load_module(str(path), enable_tvm_ffi=True), _SYMBOL)


@functools.cache
def _host() -> tuple[str, str]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return platform.machine(), " ".join(sorted(line.partition(":")[2].split()))
    return platform.machine(), platform.processor()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `owner.name` is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
