"""Compiled kernels as shared libraries inside this package: neither compiler nor linker is needed.

`scripts/lab/release/build_wheel.py` links them from the objects of `jit.objects`, each with the
functions through which an object calls CUDA (`runtime_calls.c`), which CuTe DSL has elsewhere. The
CUDA runtime is that of torch.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).with_name("compiled")  # folder of the libraries; absent from checkouts
_CALLS = Path(__file__).parent / "sm90/jit/runtime_calls.c"
_ENTRY = "entry"


@functools.cache
def installed() -> bool:
    """True if this package has compiled kernels."""
    return next(FOLDER.glob("*.so"), None) is not None


def path_of(name: str) -> Path:
    """File of a kernel by the name of `jit.launch.library_name`."""
    return FOLDER / name


def link(data: bytes, prefix: str, target: Path) -> None:
    """Link an object of `jit.objects.export` to a library; needs a C compiler.

    Raises:
        RuntimeError: there is none, or the object is no kernel's.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler, which links kernels: install gcc")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.o"
        path.write_bytes(data)
        names = subprocess.run(["nm", "--defined-only", path], capture_output=True, text=True)
        start = f"_mlir_{prefix}__mlir_ciface_"
        entry = next((name for name in names.stdout.split() if name.startswith(start)), None)
        if entry is None:
            raise RuntimeError(f"kernel not linked: it has no host function {start}...")
        flags = ["-shared", "-fPIC", "-O2", "-s", "-Wl,-Bsymbolic,-z,noexecstack"]
        alias = f"-Wl,--defsym={prefix}_{_ENTRY}={entry}"
        command = [compiler, *flags, alias, "-o", str(target), str(path), str(_CALLS)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"kernel not linked: {done.stderr.strip()}")


def symbols(path: Path, prefix: str) -> Callable[[str], int]:
    """Load a library; returns the function from a name of `jit.program.Program` to its address."""
    library = ctypes.CDLL(str(path))

    def lookup(name: str) -> int:
        symbol = f"{prefix}_{name}" if name == _ENTRY else f"_mlir_{prefix}_{name}"
        address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
        assert address is not None
        return address

    return lookup
