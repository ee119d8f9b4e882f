"""Process groups and exchanges of forward passes and the backward passes beside them.

Collectives of one communicator run in the order in which they are issued. With one communicator the
exchanges of a forward pass would wait for those of the whole backward pass beside it
(`extras.overlap.schedule`), so each kind of pass has its own; and so it has exchanges of `symm`,
each with its own buffers, flags and epochs, since those of one are waited for in the order of their
starts. What a backward pass recomputes belongs to the backward pass.

Collectives run on streams of high priority, so that they get SMs before the GEMMs of the other
pass, and take few of them, any that are free: clusters of CTAs, which NCCL takes otherwise, would
wait for neighbouring SMs. Kernels of the experts leave as many free (`EXCHANGE_SMS`), so that no
pass waits for the exchange of the other one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from phalanx.kernels.derivatives import in_backward
from phalanx.parallel.dispatcher.collectives import Group
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.nodes import time_limit
from phalanx.parallel.fault.agreement import gather

EXCHANGE_SMS = 8
"""SMs that the collectives of a pass take. NCCL moves some 10 GB/s with each inside a node, which
is more than a network has for a GPU."""


@dataclass(frozen=True)
class TwoPasses:
    """`parallel.dispatcher.collectives.Passes` of two micro-batches beside each other."""

    beside: bool = True

    def groups(self, group: dist.ProcessGroup) -> Group:
        return self.each(lambda _: new_groups(group, EXCHANGE_SMS))

    def each[T](self, make: Callable[[str], T]) -> Callable[[], T]:
        """Make two, both at once: all ranks are at the same place of a forward pass."""
        forward, backward = make("forward"), make("backward")
        return lambda: backward if in_backward() else forward


TWO_PASSES = TwoPasses()


def new_groups(group: dist.ProcessGroup, sms: int | None = None) -> Any:
    """Another group of the ranks of `group`, made on all ranks; `sms`: the most SMs it takes."""
    mine = tuple(dist.get_process_group_ranks(group))
    return {ranks: _new(ranks, sms) for ranks in sorted({*gather(mine)})}[mine]


def _new(ranks: tuple[int, ...], sms: int | None) -> Any:
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options.config.cga_cluster_size = 1
        if sms is not None:
            options.config.max_ctas = sms
    return dist.new_group(list(ranks), timeout=time_limit(), pg_options=options)


def two_pass_options(options: SymmOptions, wanted: int | str) -> SymmOptions:
    """`options` with `parallel.comm_sms` as wanted, where pushes take reserved SMs alone."""
    sms = wanted if isinstance(wanted, int) and wanted else EXCHANGE_SMS
    return replace(options, comm_sms=sms, two_passes=True)
