"""Buffers of whole layers, which the layers of a rank take in turn.

A `Unit` is what one layer has of one kind of parameters: of experts, or of all else. This rank
keeps its shard of the weights and of the sums of gradients. To compute, a unit has a place in one
of two buffers, always the same: weights are gathered there before each pass, gradients of a
micro-batch are written there and then summed over ranks into the shards. Addresses never change, so
that CUDA graphs, and tensors that autograd has saved, stay right; autograd sees none of the writes.

Gathers and sums wait for the work of the current stream and run beside what follows. A gather that
is started when a layer begins finds the buffer free (the layer before has been computed), and has
that layer's time to arrive. A sum is started when a layer's gradients are complete, and waited for
when its buffer is needed again, a layer later. A stream of its own adds it to the shard, beside
products that memory does not limit.

With several nodes (`zero3_node`) shards are those of a node's ranks, and a rank updates a part of
its shard: parts are gathered over nodes once, before a pass, and sums of all micro-batches are
summed over nodes once, after the last one.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from phalanx.extras.sharded_params.peers import Peers
from phalanx.kernels.expert_mlp import main_grad
from phalanx.parallel.dispatcher.nodes import Nodes

PLACES = 2
"""Buffers of a ring: one to compute with, one that is filled or sent meanwhile."""


class Unit:
    """Parameters of one layer and kind: the shards that this rank keeps, and their whole form."""

    def __init__(self, ring: "Ring", number: int, parameters: Sequence[Tensor]) -> None:
        self.ring, self.number, self.parameters = ring, number, parameters
        # Megatron-Core's order and alignment within a bucket.
        self.layout = DistributedOptimizer._compute_per_buffer_param_layout(
            list(parameters), None, ring.ranks * ring.nodes, DistributedDataParallelConfig()
        )
        ((_, self.size),) = self.layout.bucket_indices
        self.weights = self.grads = torch.empty(0)  # this rank's shards
        self.shards: Sequence[Tensor] = ()  # those of all ranks, of weights, if `peers` are known
        self.replaces = False  # the first gradient of each parameter overwrites the buffer
        self.last = True  # the backward pass of the last micro-batch is running, or next
        self.joining: Any = None  # the gathering of parts of `weights`
        self.begin()

    def begin(self) -> None:
        """Begin a step, in which no gradient has been summed."""
        self.fresh, self.crossed = True, False

    @property
    def shard_size(self) -> int:
        return self.size // self.ring.ranks

    @property
    def updated(self) -> slice:
        """Elements of the shards that this rank updates."""
        part = self.shard_size // self.ring.nodes
        return slice(self.ring.node * part, (self.ring.node + 1) * part)

    def place(self, parameter: Tensor, within: slice | None = None) -> tuple[slice, slice]:
        """Elements of a flattened parameter, and their place in the shards.

        Those `within` a part of the shards, or all that this rank has.
        """
        start, stop, _ = self.layout.param_index_map[parameter]
        first = self.ring.rank * self.shard_size
        within = within or slice(0, self.shard_size)
        begin = min(max(start, first + within.start), stop)
        end = max(min(stop, first + within.stop), begin)
        return slice(begin - start, end - start), slice(begin - first, end - first)

    @torch.no_grad()
    def keep(self) -> None:
        """Copy this rank's elements of the parameters to its shard of the weights."""
        for parameter in self.parameters:
            here, there = self.place(parameter)
            self.weights[there].copy_(parameter.detach().view(-1)[here])

    @property
    def whole_weights(self) -> Tensor:
        return self.ring.weights[self.number % PLACES][: self.size]

    @property
    def whole_grads(self) -> Tensor:
        return self.ring.grads[self.number % PLACES][: self.size]


class Ring:
    """Units of one kind in the order of forward passes, over the ranks that have the same.

    Args:
        group: these ranks.
        nodes: their nodes, if shards are those of a node.
        peers: these ranks, if they can read each other's memory.
    """

    def __init__(self, group: Any, nodes: Nodes | None = None, peers: Peers | None = None) -> None:
        self._group, self._rail, self._peers = group, None, peers
        self.nodes, self.node = 1, 0
        if nodes is not None:
            self._group, self._rail = nodes.inside, nodes.rail
            self.nodes, self.node = nodes.count, nodes.index
        self.rank, self.ranks = self._group.rank(), self._group.size()
        self.units: list[Unit] = []
        self.weights: list[Tensor] = []
        self.grads: list[Tensor] = []
        self._held: list[Unit | None] = [None] * PLACES  # whose weights are there, or on their way
        self._arriving: list[Any] = [None] * PLACES
        self._leaving: list[Any] = [None] * PLACES
        self._crossing: list[Any] = []
        nccl = dist.get_backend(group) == "nccl"
        self._sums = torch.cuda.Stream() if nccl else None
        self._summing: Any = None  # that stream, if it has had work since the last `finish`
        # Gathers of gloo (PyTorch 2.11) at the same time corrupt each other.
        self._waits = dist.get_backend(group) == "gloo"

    def add(self, parameters: Sequence[Tensor]) -> Unit:
        self.units.append(Unit(self, len(self.units), parameters))
        return self.units[-1]

    def allocate(self, dtype: torch.dtype, grad_dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the buffers at the first call, when all units are known."""
        if self.weights:
            assert self.weights[0].dtype == dtype
            return
        for i in range(min(PLACES, len(self.units))):
            size = max(unit.size for unit in self.units[i::PLACES])
            self.weights.append(torch.zeros(size, dtype=dtype, device=device))
            self.grads.append(torch.zeros(size, dtype=grad_dtype, device=device))

    def zeros(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Iterator[tuple[Tensor, ...]]]:
        """Shards of weights of this rank, and of each unit those that this rank can read."""
        if self._peers is None:
            return torch.zeros(sum(sizes), dtype=dtype, device=device), repeat((), len(sizes))
        of_ranks = self._peers.zeros(sum(sizes), dtype)
        return of_ranks[self.rank], zip(*(x.split(sizes) for x in of_ranks), strict=True)

    def fetch(self, number: int) -> None:
        """Start to gather a unit, unless it is there or no such unit exists."""
        if not 0 <= number < len(self.units):
            return
        unit, i = self.units[number], number % PLACES
        if self._held[i] is unit:
            return
        self._arrived(i)
        self._joined(unit)
        self._held[i] = unit
        if self._peers is not None:
            self._arriving[i] = self._peers.pull(unit.whole_weights, unit.shards)
        else:
            self._arriving[i] = dist.all_gather_into_tensor(
                unit.whole_weights, unit.weights, group=self._group, async_op=True
            )
        if self._waits:
            self._arrived(i)

    def need(self, number: int) -> None:
        """Gather a unit before the current stream goes on."""
        self.fetch(number)
        self._arrived(number % PLACES)

    def open(self, unit: Unit) -> None:
        """Make room for the gradients of a micro-batch."""
        self._summed(unit.number % PLACES)
        if unit.replaces:
            main_grad.replace_next(unit.parameters)
        else:
            unit.whole_grads.zero_()

    def reduce(self, unit: Unit, last: bool) -> None:
        """Start to sum the gradients of a micro-batch, perhaps the `last`, into the shard."""
        with self._on_sums():
            out = unit.grads if unit.fresh else torch.empty_like(unit.grads)
            grads = unit.whole_grads
            work = dist.reduce_scatter_tensor(out, grads, group=self._group, async_op=True)
            work.wait()
            if not unit.fresh:
                unit.grads.add_(out)
            unit.fresh = False
            if last:
                self._cross(unit)
        self._leaving[unit.number % PLACES] = work

    def _on_sums(self) -> AbstractContextManager[Any]:
        """The stream of sums, which waits for the current one. Its memory is its own."""
        if self._sums is None:
            return nullcontext()
        self._summing = self._sums
        self._sums.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._sums)

    def finish(self) -> None:
        """Wait for all that is on its way, and complete sums over nodes."""
        for i in range(PLACES):
            self._arrived(i)
            self._summed(i)
        if self._peers is not None:
            self._peers.meet()  # none of them reads the weights, which may change
        if (sums := self._summing) is not None:
            torch.cuda.current_stream().wait_stream(sums)
        self._summing = None
        for unit in self.units:
            self._joined(unit)
            if not unit.fresh and not unit.crossed:
                self._cross(unit)
        for work in self._crossing:
            work.wait()
        self._crossing = []

    def begin(self) -> None:
        """Have all units gathered anew: after an update, or replays of a graph."""
        self._held = [None] * PLACES
        if self._peers is not None:
            self._peers.meet()  # all of them have updated their weights
        if self._rail is None:
            return
        for unit in self.units:
            unit.joining = dist.all_gather_into_tensor(
                unit.weights, unit.weights[unit.updated], group=self._rail, async_op=True
            )
            if self._waits:
                self._joined(unit)

    def abandon(self) -> None:
        self._held, self._crossing, self._summing = [None] * PLACES, [], None
        self._arriving, self._leaving = [None] * PLACES, [None] * PLACES
        for unit in self.units:
            unit.joining = None

    def _joined(self, unit: Unit) -> None:
        if unit.joining is not None:
            unit.joining.wait()
            unit.joining = None

    def _cross(self, unit: Unit) -> None:
        """Start to sum a shard over nodes, in the part that this rank updates."""
        unit.crossed = True
        if self._rail is not None:
            part = unit.grads[unit.updated]
            work = dist.reduce_scatter_tensor(part, unit.grads, group=self._rail, async_op=True)
            self._crossing.append(work)
            if self._waits:
                work.wait()

    def _arrived(self, i: int) -> None:
        if (work := self._arriving[i]) is not None:
            self._arriving[i] = None
            work.wait()

    def _summed(self, i: int) -> None:
        if (work := self._leaving[i]) is not None:
            self._leaving[i] = None
            work.wait()
