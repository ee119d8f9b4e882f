"""A context in which operations that synchronize host and GPU are errors.

On a CPU nothing waits, so the ops that would are forbidden instead: reads of a tensor's value by
the host, and results whose shape depends on values. The inside of an allowed torch op is not
checked (the CPU's torch._grouped_mm reads its offsets); the inside of the project's custom ops is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.kernels.custom_op import OPS

_aten = torch.ops.aten

FORBIDDEN_OPS = {
    _aten._local_scalar_dense,
    _aten._unique2,
    _aten.bincount,
    _aten.equal,
    _aten.is_nonzero,
    _aten.item,
    _aten.masked_select,
    _aten.nonzero,
    _aten.unique_consecutive,
    _aten.unique_dim,
}
"""Aten ops that copy to the host or whose output size depends on values."""

FORBIDDEN_METHODS = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist}
"""Methods that copy to the host, except on CPU tensors."""


class HostSync(AssertionError):
    """An op that would synchronise device and host was called."""


@contextmanager
def sync_free() -> Iterator[None]:
    """Forbid synchronisation in forward and backward passes inside the context.

    Raises:
        HostSync: naming the op.
    """
    with _Methods(), _Ops():
        yield


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FORBIDDEN_METHODS:
            raise HostSync(f"Tensor.{func.__name__} copies to the host")
        return func(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "phalanx":
            with _Methods(), self:
                return OPS[func.name()].compute(*args, **kwargs)
        if func.overloadpacket in FORBIDDEN_OPS:
            raise HostSync(f"{func} reads values on the host")
        if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            raise HostSync(f"{func} without output_size sizes its result by values")
        if func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            raise HostSync(f"{func} with a boolean mask sizes its result by values")
        return func(*args, **kwargs)
