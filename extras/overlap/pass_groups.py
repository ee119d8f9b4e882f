"""Exchanges by collectives beside computation: weight gradients, or a pass of another micro-batch.

The gradients of a layer's weights wait for the next exchange of the backward pass, start after it,
and hide it (`kernels.wgrad_queue`). Of a kernel that fills the GPU the CTAs that find no SM beside
the exchange start after it, when CTAs that have claimed tiles meanwhile have left none to them.

Process groups for exchanges of a forward pass beside a backward pass of another micro-batch:

Collectives of one communicator run in the order in which they are issued. With one communicator the
exchanges of a forward pass would wait for those of the whole backward pass beside it
(`extras.overlap.schedule`), so each kind of pass has its own. What a backward pass recomputes
belongs to the backward pass.

Their collectives run on streams of high priority, so that they get SMs before the GEMMs of the
other pass, and take few of them, any that are free: clusters of CTAs, which NCCL takes otherwise,
would wait for neighbouring SMs. Kernels of the experts leave as many free (`EXCHANGE_SMS`), so that
no pass waits for the exchange of the other one.

Tensors of a collective belong to the stream that calls it. It waits for the collective before they
are freed, so their memory needs no record of the other stream.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels import wgrad_queue
from phalanx.parallel.dispatcher.nodes import time_limit
from phalanx.parallel.fault.agreement import gather


def in_backward() -> bool:
    """True inside a backward pass, also in what it recomputes."""
    return torch._C._current_graph_task_id() != -1


class PassGroups(NamedTuple):
    """Two process groups of the same ranks in the same order."""

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


Ranks = dist.ProcessGroup | PassGroups
"""Ranks that exchange: in both passes over one group, or over a group for each pass."""


EXCHANGE_SMS = 8
"""SMs that the collectives of a pass take. NCCL moves some 10 GB/s with each inside a node, which
is more than a network has for a GPU."""


def pass_groups(group: dist.ProcessGroup) -> PassGroups:
    """New process groups of the ranks of this one. Collective over the job.

    Args:
        group: this rank's group, one of several that have no rank in common.
    """
    mine = tuple(dist.get_process_group_ranks(group))
    everyone = sorted({*gather(mine)})
    forward, backward = ({ranks: _new(ranks) for ranks in everyone}[mine] for _ in range(2))
    return PassGroups(forward, backward)


def _new(ranks: tuple[int, ...]) -> Any:
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.max_ctas, options.config.cga_cluster_size = EXCHANGE_SMS, 1
    return dist.new_group(list(ranks), timeout=time_limit(), pg_options=options)


def start_collective(
    ranks: Ranks, x: Tensor, collective: Callable[[dist.ProcessGroup], None]
) -> Callable[[], None]:
    """Start a collective of `x` in the present pass, on a stream for exchanges.

    Args:
        ranks: its ranks.
        x: what it sends.
        collective: function that calls it over a group.

    Returns:
        A function that lets the current stream wait for it, before which none of its tensors may be
        freed.
    """
    group, done = _of_pass(ranks), None
    if x.is_cuda:
        with _exchange_stream(x.device) as stream:
            collective(group)
            done = stream.record_event()
    else:
        collective(group)

    def wait() -> None:
        if done is not None:
            torch.cuda.current_stream(x.device).wait_event(done)

    return wait


@contextmanager
def group_of_pass(ranks: Ranks, x: Tensor) -> Iterator[dist.ProcessGroup]:
    """The group for a collective of `x`, which the current stream waits for, in the present pass.

    In a backward pass the current stream computes the weight gradients that wait for an exchange
    beside it. Without them and with one group the collective is on the current stream.
    """
    group = _of_pass(ranks)
    # One rank exchanges nothing: weight gradients wait for the next exchange.
    hides = in_backward() and wgrad_queue.waits_for_exchange() and group.size() > 1
    if not x.is_cuda or not (hides or isinstance(ranks, PassGroups)):
        yield group
        if hides:  # on a CPU, in the order of a GPU
            wgrad_queue.run_beside_exchange()
        return
    with _exchange_stream(x.device) as stream:
        yield group
    if hides:
        wgrad_queue.run_beside_exchange()
    torch.cuda.current_stream(x.device).wait_stream(stream)


def _of_pass(ranks: Ranks) -> dist.ProcessGroup:
    """The group for a collective in the present pass."""
    if isinstance(ranks, PassGroups):
        return ranks.backward if in_backward() else ranks.forward
    return ranks


@contextmanager
def _exchange_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Context of the stream for exchanges in the present pass, which waits for the current one."""
    stream = _stream(device, in_backward())
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


@functools.cache
def _stream(device: torch.device, backward: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
