"""Megatron-Core's buffer of parameters and gradients, of which a rank has its shards alone.

A bucket is a unit: its parameters and their `main_grad` are views of the unit's place in a ring,
`param_data` and `grad_data` of the buffer are the shards of all its units.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import BufferType, _ParamAndGradBuffer
from megatron.core.optimizer.param_layout import PerBufferParamLayout
from torch import Tensor

from phalanx.extras.sharded_params.ring import Ring, Unit


class ShardedBuffer(_ParamAndGradBuffer):  # type: ignore[misc]
    """A buffer of parameters that all have a unit; other arguments are Megatron-Core's."""

    data_parallel_group: Any

    def __init__(self, unit_of: Mapping[Tensor, Unit], *args: Any, **named: Any) -> None:
        _, dtype, grad_dtype, named_parameters, *_ = args
        parameters = [p for p, _ in named_parameters]
        self.units = list(dict.fromkeys(unit_of[p] for p in reversed(parameters)))  # by bucket
        ring, device = self.units[0].ring, parameters[0].device
        ring.allocate(dtype, grad_dtype, device)
        sizes = [unit.shard_size for unit in self.units]
        weights, readable = ring.zeros(sizes, dtype, device)
        grads = torch.zeros(sum(sizes), dtype=grad_dtype, device=device)
        own = zip(self.units, weights.split(sizes), grads.split(sizes), readable, strict=True)
        for unit, own_weights, own_grads, shards in own:
            unit.weights, unit.grads, unit.shards = own_weights, own_grads, shards
            unit.keep()
        with _without_memory():
            super().__init__(*args, **named)
        self.param_data, self.grad_data = weights, grads

    def _get(self, shape: torch.Size, start_index: int, buffer_type: BufferType) -> Tensor:
        starts = [start for start, _ in self.bucket_indices]
        bucket = bisect_right(starts, start_index) - 1
        unit, start = self.units[bucket], start_index - starts[bucket]
        whole = unit.whole_weights if buffer_type == BufferType.PARAM else unit.whole_grads
        return whole[start : start + shape.numel()].view(shape)

    def give_to_optimizer(self) -> None:
        """Have the optimizer of this rank update what its nodes say, from now on."""
        self.data_parallel_group = _Owner(self.data_parallel_group, self.units[0].ring)

    def begin(self) -> None:
        """Have the first sums of a step replace those of the last one."""
        for unit in self.units:
            unit.begin()


class _Owner:
    """A group whose ranks are in the order of what they update."""

    def __init__(self, group: Any, ring: Ring) -> None:
        self._size, self._rank = group.size(), ring.rank * ring.nodes + ring.node

    def size(self) -> int:
        return int(self._size)

    def rank(self) -> int:
        return self._rank


def one_bucket_each(units: Sequence[Unit], default: PerBufferParamLayout) -> PerBufferParamLayout:
    """Layout of a buffer with a bucket for each unit, the last one first; else as `default`."""
    places: dict[Any, tuple[int, int, int]] = {}
    buckets, start = list[tuple[int, int]](), 0
    for i, unit in enumerate(reversed(units)):
        for p, (begin, end, _) in unit.layout.param_index_map.items():
            places[p] = start + begin, start + end, i
        buckets.append((start, start + unit.size))
        start += unit.size
    return PerBufferParamLayout(
        param_index_map=places,
        bucket_indices=buckets,
        per_bucket_numel_unpadded=[
            n for unit in reversed(units) for n in unit.layout.per_bucket_numel_unpadded
        ],
        param_indices=default.param_indices,
        num_optimizer_shards=default.num_optimizer_shards,
    )


@contextmanager
def _without_memory() -> Iterator[None]:
    """Inside, Megatron-Core makes its tensors of the current device without memory."""
    original = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        torch.cuda.current_device = original
