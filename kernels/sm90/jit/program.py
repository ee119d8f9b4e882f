"""A compiled kernel: its object file by CuTe DSL, loading its machine code, and calls.

A kernel has machine code for the GPU and a host function, which makes the TMA descriptors and
launches. That is called through its address with a block of arguments that is rewritten for each
call, so that a launch takes about a microsecond of Python; the DSL's own call wraps every argument
in objects. Objects run on any host of the same machine type, whatever CPU built them.
"""

import ctypes
import platform
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cutlass.cute as cute
from cuda.bindings import runtime
from cutlass.base_dsl.compiler import HostTarget
from cutlass.runtime import find_runtime_libraries


class Program:
    """A kernel, loaded. Calls of several threads, and to several GPUs, may overlap.

    Args:
        lookup: addresses of the functions `entry`, `cuda_init` and `cuda_load_to_device`; of
            `symbols` or `kernels.compiled_libraries.symbols`.
        kinds: those of the kernel's arguments, as `Arguments.kinds` tells them.
    """

    def __init__(self, lookup: Callable[[str], int], kinds: str) -> None:
        self._lookup = lookup
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lookup("entry"))
        self._kinds = kinds
        self._pack = struct.Struct(f"@{kinds}Q").pack_into
        self._blocks: list[_Block] = []
        self._library = ctypes.c_void_p()
        self._devices: set[int] = set()
        self._loading = threading.Lock()

    def __call__(self, device: int, values: Sequence[int], stream: int) -> None:
        """Launch on `device`, the current one, pointers being addresses and `stream` a handle.

        Raises:
            RuntimeError: the CUDA runtime rejects the launch.
        """
        if device not in self._devices:
            self.load(device)
        try:  # a block belongs to one call, whatever thread it is in
            block = self._blocks.pop()
        except IndexError:
            block = _Block(self._kinds)
        self._pack(block.values, 0, *values, stream)
        self._entry(block.arguments)
        error = block.error.value
        self._blocks.append(block)
        if error:
            raise RuntimeError(f"kernel not launched: {_error_name(error)}")

    def load(self, device: int) -> None:
        """Load the machine code on the current device, before its first launch.

        Other devices are not touched: a process creates no context on other GPUs of its node.
        """
        with self._loading:
            if device in self._devices:
                return
            library = ctypes.pointer(self._library)
            if not self._library.value:
                self._initialise("cuda_init", ctypes.pointer(library))
            self._initialise(
                "cuda_load_to_device",
                ctypes.pointer(library),
                ctypes.pointer(ctypes.c_int32(device)),
            )
            self._devices.add(device)

    def _initialise(self, name: str, *arguments: Any) -> None:
        error = ctypes.c_int32(0)
        pointers = [ctypes.cast(a, ctypes.c_void_p) for a in (*arguments, ctypes.pointer(error))]
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._lookup(name))(
            (ctypes.c_void_p * len(pointers))(*pointers)
        )
        if error.value:
            raise RuntimeError(f"kernel not loaded: {_error_name(error.value)}")


class _Block:
    def __init__(self, kinds: str) -> None:
        kinds += "Qi"  # the stream, and the error
        # `struct` aligns a value of no size as one of its kind: the offset at which that begins.
        offsets = [struct.calcsize(f"@{kinds[:n]}0{kind}") for n, kind in enumerate(kinds)]
        self.values = ctypes.create_string_buffer(struct.calcsize(f"@{kinds}"))
        self.error = ctypes.c_int32.from_buffer(self.values, offsets[-1])
        base = ctypes.addressof(self.values)
        self.arguments = (ctypes.c_void_p * len(offsets))(*(base + o for o in offsets))


def _error_name(code: int) -> str:
    return f"{runtime.cudaError_t(code).name} ({code})"


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
    """Link an object of `export`; returns the function from a name of `Program` to its address."""
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
