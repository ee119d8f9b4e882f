"""Gathering of the parameters that each data parallel rank has updated a part of.

Megatron-Core gathers buckets of parameters beside forward passes, in hooks of modules, and the host
notes which a step has gathered. A captured step gathers all of them in every replay, of which the
host notes nothing: `ParamGather` corrects its notes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from phalanx.parallel.megatron.updated import parts

_AHEAD = 2
"""Buckets that are on their way at a time. The two weights of a layer's experts, waited for at
once, are often a bucket each; with one at a time the second would be late."""


class ParamGather:
    """Gathering of parameters beside forward passes, of chunks with `overlap_param_gather`."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        # Buckets are in the order of the backward pass.
        self._dense = [g for c in chunks for g in reversed(c.bucket_groups)]
        self._experts = [g for c in chunks for g in reversed(c.expert_parallel_bucket_groups)]
        for groups in (self._dense, self._experts):
            later = [*groups[_AHEAD:], *[None] * _AHEAD]
            for group, following in zip(groups, later, strict=False):
                group.next_param_gather_bucket_group = following  # also of the next chunk
        for group in self._groups():
            if dist.get_backend(group.intra_distributed_optimizer_instance_group) == "gloo":
                group.start_param_sync = partial(_gather_now, group, group.start_param_sync)
        if self._dense:
            first = self._dense[0]
            first.finish_param_sync = partial(self._finish_first, first, first.finish_param_sync)

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        self.begin()
        yield
        self.end()

    def begin(self) -> None:
        """Start to gather what forward passes wait for first.

        Megatron-Core would start when the first module is called: a pipeline stage then has its
        input.
        """
        _start(self._dense or self._experts)

    def end(self) -> None:
        """Wait for what forward passes have not waited for, of modules that they did not call."""
        for group in self._groups():
            if group.param_gather_handle is not None:
                group.finish_param_sync(skip_next_bucket_dispatch=True)

    def invalidate(self) -> None:
        """Have the next forward passes gather all parameters."""
        for group in self._groups():
            assert group.param_gather_handle is None, "called between `begin` and `end`"
            group.param_gather_dispatched = False

    def abandon(self) -> None:
        for group in self._groups():
            group.param_gather_handle = None
        self.invalidate()

    def _groups(self) -> chain[Any]:
        return chain(self._dense, self._experts)

    def _finish_first(self, first: Any, finish: Callable[..., None], **named: Any) -> None:
        """Start experts' parameters once the embedding has its own, which nothing else hides."""
        gathers = first.param_gather_handle is not None or not first.param_gather_dispatched
        finish(**named)
        if gathers:
            _start(self._experts)


def _start(groups: Sequence[Any]) -> None:
    for group in groups[:_AHEAD]:
        if not group.param_gather_dispatched:
            group.start_param_sync()


def _gather_now(group: Any, start: Callable[..., None], **named: Any) -> None:
    """Gather a bucket before this returns.

    The worker threads of a gloo group (PyTorch 2.11) assign the name of what they have completed to
    one string, without a lock (`ProcessGroupGloo::runLoop`), which two coalesced gatherings at a
    time would corrupt.
    """
    start(**named)
    if group.param_gather_handle is not None:
        group.param_gather_handle.wait()


def gather_once(optimizer: Any) -> None:
    """Have a chain of optimizers gather parameters after the last of their updates.

    Megatron-Core 0.19.2 gathers all parameters after each, those of experts and all others.
    """
    sharded = [part for part in parts(optimizer) if isinstance(part, DistributedOptimizer)]
    for part in sharded[:-1]:
        part._defer_param_sync = True


def gathered(module: Any) -> Any:
    """The module, its own weights as the last step of the optimizer left them.

    Megatron-Core waits for a module's weights in a hook before its forward pass. Whoever computes
    with them without calling the module asks here first.
    """
    for hook in module._forward_pre_hooks.values():
        hook(module, ())
    return module
