"""Megatron-Core on a host without CUDA: gloo process groups, CPU tensors, the same training code.

Megatron-Core 0.19.2 names the CUDA device in five kinds of places on the training path: device
literals, the current device, streams and events, `Tensor.type()` strings, and the CUDA random
state. `install()` substitutes those five and nothing else; with CUDA present it does nothing. Call
it before the first import of a Megatron-Core module that builds tensors.
"""

import contextlib
import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _Inert:
    """Stream and Event of a device that runs in order: every method is a no-op returning itself."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self

    def __enter__(self) -> "_Inert":
        return self

    def __exit__(self, *exc: object) -> None: ...


class _CudaMeansCpu(TorchFunctionMode):
    """Sends `device="cuda"` and `.cuda()` to the CPU, and answers `.type()` as a CUDA tensor would.

    Megatron-Core recognises floating-point parameters by the string `torch.cuda.FloatTensor`.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if not kwargs and func not in _ANSWERED:  # nearly all calls
            return func(*args)
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to:
            args = tuple(_CPU if _names_cuda(a) else a for a in args)
        if kwargs.get("pin_memory"):  # needs a driver
            kwargs = {**kwargs, "pin_memory": False}
        if _names_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


_ANSWERED = frozenset({torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to})
"""Functions that `_CudaMeansCpu` looks at even if they have no keyword arguments."""


def _names_cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


_installed: list[_CudaMeansCpu] = []


def install() -> bool:
    """Make Megatron-Core run on this host's CPU. Idempotent.

    Returns:
        True if the substitutions are active, False where CUDA is available and none is needed.
    """
    if torch.cuda.is_available():
        return False
    if _installed:
        return True
    # Compiling Megatron-Core's small fused functions takes half a minute and gains nothing here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    inert, cuda = _Inert(), torch.cuda
    cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    cuda.synchronize = lambda *a, **k: None
    cuda.Stream = cuda.Event = _Inert  # type: ignore[assignment, misc]
    cuda.current_stream = cuda.default_stream = lambda *a, **k: inert  # type: ignore[assignment]
    cuda.stream = lambda *a, **k: contextlib.nullcontext()  # type: ignore[assignment]
    cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()  # type: ignore[assignment]

    import megatron.core.tensor_parallel.random as rng

    rng._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()  # type: ignore[assignment]
    rng._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)  # type: ignore[assignment]
    mode = _CudaMeansCpu()
    mode.__enter__()
    _installed.append(mode)
    return True
