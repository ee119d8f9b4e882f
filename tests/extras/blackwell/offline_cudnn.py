"""nvidia-cudnn-frontend itself without a GPU: everything except launches.

`offline` makes the installed package see a Blackwell GPU. Its wrappers then derive, check and
optionally compile for sm_100a the kernels that they would run, from tensors in host memory; a
launch does nothing and leaves outputs as they were allocated.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

ARCH = "sm_100a"
SMS = 148
"""SMs of a B200."""


@dataclass
class Compiled:
    """A kernel requested from the compiler."""

    kernel: str
    """Class of the kernel."""
    ptx: str = ""
    cubin: bytes = b""


@dataclass
class Log:
    """Kernels compiled and launched."""

    compiled: list[Compiled] = field(default_factory=list)
    launches: int = 0


@contextlib.contextmanager
def offline(compiles: bool, folder: Any = None) -> Iterator[Log]:
    """Yield a log of compilations and launches.

    Args:
        compiles: kernels are compiled, not only checked.
        folder: empty folder for the compiler's artifacts.
    """
    import cuda.bindings.driver as cuda
    import cudnn
    import cutlass
    import cutlass.cute as cute

    log, compiler, empty = Log(), cute.compile, torch.empty

    def launched(*args: Any, **kwargs: Any) -> None:
        log.launches += 1

    def compile_(kernel: Any, *args: Any, options: str = "", **kwargs: Any) -> Any:
        compiled = Compiled(type(kernel).__name__)
        if compiles:
            options_ = f"{options} --gpu-arch {ARCH} --keep-ptx --keep-cubin --dump-dir {folder}"
            artifacts = compiler(kernel, *args, options=options_, **kwargs).artifacts
            compiled.ptx, compiled.cubin = artifacts.PTX, artifacts.CUBIN
        log.compiled.append(compiled)
        return launched

    def allocate(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("dtype") is not torch.uint8:
            device = "cpu" if str(device).startswith("cuda") else device
            return empty(*size, device=device, **kwargs)
        (count,) = size  # a workspace, aligned as on a GPU
        storage = empty(count + 128, dtype=torch.uint8)
        skip = -storage.data_ptr() % 128
        return storage[skip : skip + count]

    def from_dlpack(tensor: torch.Tensor, assumed_align: int | None = None, **options: Any) -> Any:
        """Place tensors that are passed to the compiler in global memory, not in the host's."""
        passed = tensor.dtype is torch.uint8 and options.get("enable_tvm_ffi")
        if not passed or not tensor.numel():
            return original(tensor, assumed_align=assumed_align, **options)
        return cute.runtime.make_fake_compact_tensor(
            cutlass.Uint8, tuple(tensor.shape), assumed_align=assumed_align
        )

    original = cute.runtime.from_dlpack
    for name in ("glu", "dglu", "quant", "wgrad", "unfused"):  # created on first access
        getattr(cudnn, f"grouped_gemm_{name}_wrapper_sm100".replace("_unfused", ""))
    facts: dict[str, Any] = {
        "cuda_is_available": lambda: True,
        "get_compute_capability": lambda *args: (10, 0),
        "default_stream": lambda framework: cuda.CUstream(0),
        "allocate_byte_workspace": lambda framework, count, device: allocate(
            count, dtype=torch.uint8
        ),
        "stream_context": lambda *args: contextlib.nullcontext(),
        "from_dlpack": from_dlpack,
        "_raw_stream": lambda torch: lambda device: 0,
        "is_sm107_device": lambda *args: False,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUTE_DSL_ARCH", ARCH)
        for module in [m for n, m in sys.modules.items() if n.split(".")[0] == "cudnn"]:
            for name, value in facts.items():
                if name in vars(module):
                    patch.setattr(module, name, value)
            for name in list(vars(module)):  # of compiled kernels, of this process
                if name.startswith("_cache_of_") or name.endswith("wrapper_memo"):
                    patch.setattr(module, name, {})
        hardware = cutlass.utils.HardwareInfo
        patch.setattr(hardware, "__init__", lambda self, *args: None)
        patch.setattr(hardware, "get_max_active_clusters", lambda self, size: SMS // size)
        patch.setattr(cute, "compile", compile_)
        patch.setattr(torch, "empty", allocate)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_capability", lambda *args: (10, 0))
        patch.setattr(torch.cuda, "current_stream", lambda *args: _Stream())
        yield log


class _Stream:
    cuda_stream = 0


def installed() -> bool:
    """True if the package is installed."""
    from phalanx.kernels import registry

    return "nvidia_cudnn_frontend" in registry.installed()
