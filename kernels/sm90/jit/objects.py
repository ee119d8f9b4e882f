"""Compiled kernels as object files: export by CuTe DSL, and loading through it.

Objects run on any host of the same machine type, whatever CPU built them.
"""

import ctypes
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cutlass.base_dsl.compiler import HostTarget
from cutlass.runtime import find_runtime_libraries

HOSTS = {
    "x86_64": "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64",
    "aarch64": "linux-aarch64",
}
"""Host targets of `export`, by `platform.machine()`."""


def export(compiled: Any, prefix: str) -> bytes:
    """Object file of a result of `cute.compile`, with symbols that start with `prefix`."""
    for library in find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # its symbols must be found in the export
    compiled.host_target = HostTarget(HOSTS[platform.machine()])
    return compiled.dump_to_object(prefix)


def symbols(data: bytes, prefix: str) -> Callable[[str], int]:
    """Link an object; returns the function from a name of `jit.program.Program` to its address.

    Args:
        data, prefix: result and argument of `export`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(data)
        function = cute.runtime.load_module(str(path))[prefix]

    def lookup(name: str) -> int:
        if name == "entry":
            address = ctypes.cast(function.capi_func, ctypes.c_void_p).value
        else:
            address = function.engine.lookup(f"_mlir_{prefix}_{name}")
        assert address is not None
        return address

    return lookup
