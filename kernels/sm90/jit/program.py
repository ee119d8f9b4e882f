"""A compiled kernel in this process: loading its machine code, and calls.

A kernel has machine code for the GPU and a host function, which makes the TMA descriptors and
launches. That is called through its address with a block of arguments that is rewritten for each
call, so that a launch takes about a microsecond of Python; the DSL's own call wraps every argument
in objects.
"""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

from cuda.bindings import runtime


class Program:
    """A kernel, loaded. Calls of several threads, and to several GPUs, may overlap."""

    def __init__(self, lookup: Callable[[str], int], kinds: str) -> None:
        """Needs no GPU.

        Args:
            lookup: addresses of the functions `entry`, `cuda_init` and `cuda_load_to_device`; of
                `jit.objects.symbols` or `jit.libraries.symbols`.
            kinds: those of the kernel's arguments, as `Arguments.kinds` tells them.
        """
        self._lookup = lookup
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lookup("entry"))
        self._kinds = kinds
        self._pack = struct.Struct(f"@{kinds}Q").pack_into
        self._blocks: list[_Block] = []
        self._library = ctypes.c_void_p()
        self._devices: set[int] = set()
        self._loading = threading.Lock()

    def __call__(self, device: int, values: Sequence[int], stream: int) -> None:
        """Launch on `device`, which must be the current one.

        Args:
            values: arguments of the kernel, pointers as addresses.
            stream: a CUDA stream's handle.

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
        """Load the machine code on a device, which must be the current one, before its first
        launch.

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
        """Call a function of the object, whose last argument receives the error."""
        error = ctypes.c_int32(0)
        pointers = [ctypes.cast(a, ctypes.c_void_p) for a in (*arguments, ctypes.pointer(error))]
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._lookup(name))(
            (ctypes.c_void_p * len(pointers))(*pointers)
        )
        if error.value:
            raise RuntimeError(f"kernel not loaded: {_error_name(error.value)}")


class _Block:
    """Arguments of one call: their values, and pointers to each and to the error."""

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
