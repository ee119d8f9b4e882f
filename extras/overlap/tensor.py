"""Collectives of tensor ranks in two passes beside each other.

Megatron-Core gathers tokens in front of a product and scatters sums behind it. Over one
communicator those of a forward pass would wait for all of the backward pass beside it, so backward
passes have another one (`extras.overlap.passes`). The buffer that tokens are gathered into is one
for the process; backward passes have one of their own.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers, mappings
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor

from phalanx.extras.overlap.passes import new_groups
from phalanx.kernels.derivatives import in_backward

_BACKWARD: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
"""Groups of backward passes by those of forward passes."""


def separate(group: dist.ProcessGroup) -> None:
    """Give backward passes what this rank's tensor ranks share. Collective over all ranks."""
    if group.size() == 1:
        return
    _BACKWARD.clear()  # of a run before, in the same process
    _BACKWARD[group] = new_groups(group)
    for module in (layers, mappings):
        for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
            function = getattr(module, name)
            if not hasattr(function, "of_a_pass"):
                setattr(module, name, _of_a_pass(function))
    if not isinstance(parallel_state._GLOBAL_MEMORY_BUFFER, _PassBuffers):
        parallel_state._GLOBAL_MEMORY_BUFFER = _PassBuffers()


def _of_a_pass(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*given: Any, group: Any = None, **named: Any) -> Any:
        if in_backward():
            group = _BACKWARD.get(group, group)
        return function(*given, group=group, **named)

    call.of_a_pass = True  # type: ignore[attr-defined]
    return call


class _PassBuffers(GlobalMemoryBuffer):
    def get_tensor(self, tensor_shape: Any, dtype: Any, name: str, *given: Any) -> Tensor:
        if in_backward():
            name = f"{name} of backward passes"
        return super().get_tensor(tensor_shape, dtype, name, *given)  # type: ignore[no-any-return]
