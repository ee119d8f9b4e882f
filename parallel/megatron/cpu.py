"""Megatron-Core on a host without CUDA: gloo process groups, CPU tensors, the same training code.

Megatron-Core 0.19.2 names the CUDA device in five kinds of places on the training path: device
literals, the current device, streams and events, `Tensor.type()` strings, and the CUDA random
state. `install()` substitutes those five and nothing else. Call it before the first import of a
Megatron-Core module that builds tensors.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

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


def _redirect() -> None:
    """Send `device="cuda"` and `.cuda()` to the CPU, and answer `.type()` as a CUDA tensor would.

    Megatron-Core recognises floating-point parameters by the string `torch.cuda.FloatTensor`. The
    functions are replaced one by one: a `TorchFunctionMode` would be called for every operation,
    which costs a quarter of the training of a tiny model.
    """
    tensor, make = torch.Tensor, _device_constructors()  # which remembers them as they are now
    for module in (torch, torch.fft, torch.nested):
        for name in [name for name, value in vars(module).items() if _is_one_of(value, make)]:
            setattr(module, name, _on_cpu(getattr(module, name)))
    for owner, names in ((torch, _LIKE), (tensor, _NEW)):
        for name in names:
            setattr(owner, name, _on_cpu(getattr(owner, name)))
    to, type_ = tensor.to, tensor.type

    @functools.wraps(to)
    def moved(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and _names_cuda(args[0]):
            args = (_CPU, *args[1:])
        if kwargs and _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        return to(self, *args, **kwargs)

    @functools.wraps(type_)
    def typed(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_(self, *args, **kwargs)
        name = type_(self)
        # A TorchFunctionMode, as tests have, finds and calls this function again inside of it.
        return name if "cuda" in name else name.replace("torch.", "torch.cuda.", 1)

    tensor.to, tensor.type = moved, typed  # type: ignore[method-assign, assignment]
    tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]


_LIKE = [f"{name}_like" for name in ["empty", "zeros", "ones", "full", "rand", "randn", "randint"]]
_NEW = [f"new_{name}" for name in ["tensor", "empty", "empty_strided", "zeros", "ones", "full"]]


def _is_one_of(value: Any, functions: set[Any]) -> bool:
    return callable(value) and isinstance(value, Hashable) and value in functions


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs:
            if kwargs.get("pin_memory"):  # needs a driver
                kwargs["pin_memory"] = False
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
        return make(*args, **kwargs)

    return made


def _names_cuda(device: object) -> bool:
    """Return whether the CPU stands in for a device; not under `DisableTorchFunction`."""
    named = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return named and not torch._C._is_torch_function_all_disabled()


_installed: list[bool] = []


def install() -> bool:
    """Make Megatron-Core run on this host's CPU, unless it has CUDA; returns whether it does."""
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
    # torch.manual_seed would keep a stack trace of every call for devices that are not here.
    cuda.manual_seed = torch.default_generator.manual_seed  # type: ignore[assignment]
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *a, **k: torch.get_rng_state()  # type: ignore[assignment]

    import megatron.core.tensor_parallel.random as rng

    rng._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()  # type: ignore[assignment]
    rng._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)  # type: ignore[assignment]
    _redirect()
    _installed.append(True)
    return True
