"""Models without memory."""

import inspect

import torch
from torch.overrides import TorchFunctionMode


class OnMeta(TorchFunctionMode):
    """Inside, new tensors are on the meta device: to count the parameters of any model."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if "device" in kwargs or func in _FACTORIES:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0]
        return func(*args, **kwargs)


_FACTORIES = tuple(  # themselves, also where parallel.megatron.cpu stands before them
    inspect.unwrap(make)
    for make in (
        torch.empty,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.randn,
        torch.rand,
        torch.tensor,
    )
)
