"""Call kernels of this package with torch tensors, on the current stream.

A kernel (see `Kernel`) is compiled once per configuration, for any sizes, and cached on disk by
`kernels.cache`. A launch reads no tensor on the host and can be captured in a CUDA graph;
`prepare`, or a first launch, has to come before the capture.
"""

import functools
import platform
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass.cute.runtime import make_ptr
from torch import Tensor

from phalanx.configs.tables.activations import ACTIVATIONS
from phalanx.kernels import compiled_libraries as libraries
from phalanx.kernels.availability import CUTLASS_DSL
from phalanx.kernels.cache import Cache, digest_of, folder, name_of
from phalanx.kernels.launch_options import LaunchOptions
from phalanx.kernels.limits import Refusal
from phalanx.kernels.registry import KernelUnavailable
from phalanx.kernels.sm90.jit.pointers import Parameter, arguments_of
from phalanx.kernels.sm90.jit.program import Program
from phalanx.kernels.sm90.jit.stand_ins import compiler_fits
from phalanx.kernels.tracing import recorder

ARCH = "sm_90a"  # default target of compilation
ARCHES = {(9, 0): ARCH, (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Targets by CUDA capability: kernels with warpgroup instructions support the first alone."""
_ALIGN = 16
_HERE = Path(__file__).parents[1]
PREFIX = "phalanx"  # beginning of the names of a kernel's functions


class Kernel(Protocol):
    """Interface of a kernel class; `cute.compile` takes its instances."""

    # Kernels that are for `ARCH` alone also have `warpgroups: ClassVar[bool] = True`.

    def __init__(self, config: Any) -> None:
        """`config` is a frozen dataclass whose repr names every compiled-in choice."""

    def __call__(self, *arguments: Any) -> None:
        """Host side: arguments as `jit.pointers` knows them, then the stream."""


_PROGRAMS: dict[tuple[type[Kernel], Any], Program] = {}
_PREPARING = threading.Lock()  # the compiler serves one thread at a time


def launch(kernel: type[Kernel], config: Any, /, **arguments: Any) -> None:
    """Run a kernel on the current stream of the tensors' device.

    Args:
        kernel, config: its class and its compiled-in choices.
        arguments: arguments of its `__call__`, by name: a tensor for a pointer (None is a null
            pointer), an int for an Int32, a record for a record.

    Raises:
        TypeError: an argument is missing or unknown.
        ValueError: a tensor is not aligned as the kernel assumes, or an integer does not fit.
        RuntimeError: the CUDA runtime rejects the launch.
    """
    program = _PROGRAMS.get((kernel, config)) or _program(kernel, config)
    known = arguments_of(kernel)
    if arguments.keys() != known.parameters.keys():
        raise TypeError(f"{kernel.__name__} takes {[*known.parameters]}, not {[*arguments]}")
    values: list[Any] = []
    for name, parameter in known.parameters.items():
        if parameter.record is None:
            values.append(arguments[name])
        else:
            values += arguments[name]
    recording = recorder()
    given = values.copy() if recording else []
    device = next(t for at, _ in known.pointers if (t := values[at]) is not None).get_device()
    for at, align in known.pointers:
        tensor = values[at]
        values[at] = address = 0 if tensor is None else tensor.data_ptr()
        if address % align:
            name = [*known.values][at]
            raise ValueError(f"{kernel.__name__}: {name} must start at a multiple of {align} bytes")
    stream = torch._C._cuda_getCurrentRawStream(device)  # makes no Stream object
    try:
        if device == torch.cuda.current_device():
            program(device, values, stream)
        else:
            with torch.cuda.device(device):
                program(device, values, stream)
    except struct.error:
        pairs = zip(known.values.items(), values, strict=True)
        sizes = {name: value for (name, element), value in pairs if element is None}
        raise ValueError(f"{kernel.__name__} takes integers below 2^31, not {sizes}") from None
    if recording:
        places = [at for at, _ in known.pointers]
        recording.launched(lambda found: program(device, found, stream), given, places)


def prepare(kernel: type[Kernel], config: Any, device: torch.device) -> None:
    """Compile a kernel or load it from disk, and load it on a CUDA device, as a first launch does.

    For use before a capture, and before kernels that wait for other ones.
    """
    with torch.cuda.device(device):
        _program(kernel, config).load(torch.cuda.current_device())


def refuse(kernel: type[Kernel], arch: str) -> Refusal:
    """Reason why a kernel cannot be compiled for a target, or None."""
    if arch == ARCH or not getattr(kernel, "warpgroups", False):
        return None
    return (
        f"{kernel.__name__} uses warpgroup instructions, which exist on {ARCH} but not on {arch}: "
        "use kernels=cudnn or kernels=torch there"
    )


def compile_kernel(
    kernel_type: type[Kernel], config: Any, options: str = "", arch: str | None = None
) -> Any:
    """Compile a kernel with `cute.compile`, without a GPU and without the cache.

    `options` are further ones of `cute.compile`, such as `--keep-cubin`; `arch`, by default ARCH,
    is one of ARCHES. A kernel that is not for this target is a ValueError.
    """
    arch = arch or ARCH
    if why := refuse(kernel_type, arch):
        raise ValueError(why)
    return cute.compile(
        kernel_type(config),
        *map(_placeholder, arguments_of(kernel_type).parameters.values()),
        cuda.CUstream(0),
        options=f"--gpu-arch {arch} {options}".strip(),
    )


def entry_name(kernel: type[Kernel], config: Any, arch: str | None = None) -> str:
    """Name of the kernel in a `Cache`: a hash of everything that its machine code depends on."""
    compiler = version("nvidia-cutlass-dsl")
    return name_of(kernel.__name__, arch or ARCH, compiler, *_facts(kernel, config))


def library_name(kernel: type[Kernel], config: Any) -> str:
    """Name of the kernel among `jit.libraries`, which are for `ARCH`."""
    name = name_of(kernel.__name__, ARCH, *_facts(kernel, config))
    return name.removesuffix(".o") + ".so"


def _facts(kernel: type[Kernel], config: Any) -> tuple[str, ...]:
    """Facts on which a kernel's machine code depends, but its target and its compiler."""
    return (
        *(platform.machine(), _sources()),
        *(f"{kernel.__module__}.{kernel.__qualname__}", repr(config)),
        *_epilogues(repr(config)),
        *_outside(kernel, config),
    )


def build(kernel: type[Kernel], config: Any, cache: Cache, arch: str | None = None) -> bytes:
    """The kernel's object from the cache, compiled if it is missing; needs no GPU."""
    from phalanx.kernels.sm90.jit.program import export

    return cache.fetch(
        entry_name(kernel, config, arch),
        lambda: export(compile_kernel(kernel, config, arch=arch), PREFIX),
    )


@functools.cache
def sms(device: torch.device) -> int:
    """SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def persistent_ctas(device: torch.device, options: LaunchOptions) -> int:
    """CTAs of a persistent kernel: one for each SM that is not left free, at least 1."""
    return max(1, sms(device) - options.sm_margin)


def check(
    device: torch.device,
    name: str,
    tensor: Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...] | None,
) -> None:
    """Check a tensor argument of a kernel; None, an absent optional tensor, passes.

    Device, dtype, shape (None: any), contiguity and, for bf16, alignment to 16 bytes raise a
    ValueError.
    """
    if tensor is None:
        return
    if not tensor.is_cuda or tensor.device != device:
        wanted = f"the CUDA device {device}" if device.type == "cuda" else "a CUDA device"
        raise ValueError(f"{name} must be on {wanted}, not on {tensor.device}")
    if tensor.dtype != dtype or (shape is not None and tensor.shape != shape):
        wanted = "" if shape is None else f" {list(shape)}"
        raise ValueError(f"{name} must be {dtype}{wanted}, not {tensor.dtype} {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of strides {tensor.stride()}")
    if dtype == torch.bfloat16 and tensor.data_ptr() % _ALIGN:
        raise ValueError(f"{name} must start at a multiple of {_ALIGN} bytes")


def _program(kernel: type[Kernel], config: Any) -> Program:
    with _PREPARING:
        program = _PROGRAMS.get((kernel, config))
        if program is None:
            program = Program(_symbols(kernel, config), arguments_of(kernel).kinds)
            _PROGRAMS[kernel, config] = program
        return program


def _symbols(kernel: type[Kernel], config: Any) -> Callable[[str], int]:
    """Functions of a kernel, from the compiled ones of this package or from the cache.

    Raises:
        KernelUnavailable: it is not among the former, and there is no compiler for it.
    """
    arch = _arch()
    if arch in (None, ARCH) and libraries.installed():
        path = libraries.path_of(library_name(kernel, config))
        if path.exists():
            return libraries.symbols(path, PREFIX)
        if not compiler_fits():
            raise KernelUnavailable(
                f"{kernel.__name__} {config} is not among the compiled kernels: "
                f"pip install '{CUTLASS_DSL}' compiles it, or use backend=torch"
            )
    from phalanx.kernels.sm90.jit.program import symbols

    return symbols(build(kernel, config, Cache(folder()), arch), PREFIX)


@functools.cache
def _arch() -> str | None:
    """Target of this process's GPU; a process has GPUs of one kind."""
    return ARCHES.get(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None


@functools.cache
def _sources() -> str:
    """Hash of all sources that kernels are traced from, read once per process."""
    files = (path for path in _HERE.rglob("*.py") if path.name != "shipped.py")  # a list of them
    return digest_of([*files, _HERE.parent / "expert_mlp/activation.py"])


def _epilogues(config: str) -> Iterator[str]:
    """Register functions of a configuration's activations; for one outside of this folder, whose
    sources are hashed anyway, also the hash of its file."""
    for kind, facts in ACTIVATIONS.items():
        if facts.cute and f"kind={kind!r}" in config:
            yield facts.cute
            spec = find_spec(facts.cute.partition(":")[0])
            if spec is not None and spec.origin and _HERE not in Path(spec.origin).parents:
                yield digest_of([Path(spec.origin)])


def _outside(kernel: type[Kernel], config: Any) -> Iterator[str]:
    """Names and hashes of classes that are not in this folder: a kernel's, by all files beside it,
    and those of a configuration's epilogue, by their own."""
    for kind in (*kernel.__mro__, *type(getattr(config, "epilogue", None)).__mro__):
        file = Path(getattr(sys.modules[kind.__module__], "__file__", None) or _HERE / "builtin")
        if _HERE not in file.parents:
            yield f"{kind.__module__}.{kind.__qualname__}"
            yield digest_of([*file.parent.glob("*.py")] if kind in kernel.__mro__ else [file])


def _placeholder(parameter: Parameter) -> Any:
    values = [
        Int32(0)
        if element is None
        else make_ptr(element.dtype, 0, cute.AddressSpace.gmem, assumed_align=element.align)
        for element in parameter.elements
    ]
    return values[0] if parameter.record is None else parameter.record(*values)


def require(device: torch.device, **arguments: tuple[Tensor | None, torch.dtype, Any]) -> None:
    """`check` each argument, a triple of tensor, dtype and shape (None: any)."""
    for name, (tensor, dtype, shape) in arguments.items():
        check(device, name, tensor, dtype, shape)


def launch_persistent(
    kernel: type[Kernel],
    config: Any,
    device: torch.device,
    options: LaunchOptions,
    counter: Tensor | None,
    /,
    **arguments: Any,
) -> None:
    """`launch` a kernel of one CTA an SM, which claims its tiles, on the SMs that `options` leave.

    `counter` is int32 [1], 0 before the call and after it, by default that of `counter_of`;
    launches that may overlap must not share one.
    """
    counter = counter_of(device) if counter is None else counter
    ctas = persistent_ctas(device, options)
    launch(kernel, config, **arguments, counter=counter, ctas=ctas)


def counter_of(device: torch.device) -> Tensor:
    """A claim counter, int32 [1] and 0, for a kernel on the current stream.

    Kernels of a stream share one, as each leaves it at 0. A captured kernel gets its own: the
    stream of a graph, and what overlaps it, are unknown.
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    if torch.cuda.is_current_stream_capturing():
        return _CAPTURED.take(device, stream, _capture_on(stream))
    return _of_stream(device, stream)


class CaptureCounters:
    """Counters in the memory of the graph that is being captured, which zeroes them itself.

    They are allocated as needed and live as long as the graph, in blocks, one for each stream,
    whose kernels follow the one that zeroes it: one zeroing serves hundreds of launches.
    """

    BLOCK = 512

    def __init__(self) -> None:
        self._capture = 0
        self._blocks: list[Tensor] = []
        """Blocks of this capture: memory dropped during a capture would be reused within it."""
        self._left: dict[int, list[Tensor]] = {}  # unused counters by stream

    def take(self, device: torch.device, stream: int, capture: int) -> Tensor:
        """The next counter of the current stream, int32 [1]; there is one capture at a time."""
        if capture != self._capture:
            self._capture, self._blocks, self._left = capture, [], {}
        if not self._left.get(stream):
            block = torch.zeros(self.BLOCK, dtype=torch.int32, device=device)
            self._blocks.append(block)
            self._left[stream] = list(block.split(1))
        return self._left[stream].pop()


_CAPTURED = CaptureCounters()


def _capture_on(stream: int) -> int:
    error, _, number, *_ = cuda.cuStreamGetCaptureInfo(cuda.CUstream(stream))
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cannot query the capture of a stream: {error.name}")
    return int(number)


@functools.cache
def _of_stream(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)
