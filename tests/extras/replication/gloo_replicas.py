"""Exchanges of replicas for `symm` by collectives of gloo, on CPU ranks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.extras.replication import memory, symm
from phalanx.extras.replication.kernels import rows, weights
from phalanx.extras.replication.transfers import HIDDEN, Control
from phalanx.kernels.expert_mlp.mlp_spec import Layer, MLPWeights, layer_pair

EMPTY = 7.0
"""In a slot without a replica."""


class GlooUnreducedMemory:
    """`extras.replication.memory.UnreducedMemory`."""

    def __init__(self, group: dist.ProcessGroup, tokens: int, hidden: int, slots: int) -> None:
        self._group = group
        self.rows_KTD = torch.full((slots, tokens, hidden), float("nan"), dtype=torch.bfloat16)

    def sent(self, return_plan: rows.ReturnPlan) -> Callable[[Tensor], None]:
        return lambda y_SD: self.send(y_SD, return_plan)

    def send(self, y_SD: Tensor, return_plan: rows.ReturnPlan) -> None:
        sent = torch.full((self._group.size(), *self.rows_KTD.shape), float("nan"))
        sent_RKTD, named_RKT1 = sent.to(y_SD.dtype), torch.zeros(*sent.shape[:3], 1)
        rows.send_unreduced_rows(y_SD, return_plan, sent_RKTD.unbind())
        rows.send_unreduced_rows(torch.ones(len(y_SD), 1), return_plan, named_RKT1.unbind())
        received_RKTD, written_RKT1 = (_exchanged(x, self._group) for x in (sent_RKTD, named_RKT1))
        assert written_RKT1.sum(0).max() <= 1, "two ranks have written to a row"
        self.rows_KTD.fill_(float("nan"))
        for received_KTD, written_KT1 in zip(received_RKTD, written_RKT1, strict=True):
            self.rows_KTD.copy_(torch.where(written_KT1 > 0, received_KTD, self.rows_KTD))


class GlooReplicaMemory:
    """`extras.replication.memory.ReplicaMemory`."""

    def __init__(self, group: dist.ProcessGroup, slots: int, own: MLPWeights) -> None:
        self._group = group

        def made(dtype: torch.dtype) -> Any:
            shapes = (None if w is None else (slots, *w.shape[1:]) for w in own)
            nan = float("nan")
            return MLPWeights(*(s and torch.full(s, nan, dtype=dtype) for s in shapes))

        self.weights, self.grads = made(own.w1.dtype), made(torch.float32)

    def send_weights(self, own: MLPWeights, expert_RG: Tensor, first: Layer) -> None:
        self._waits = [False, True]
        rank, local = self._group.rank(), len(own.w1)
        for w, slots_G in zip(own, self.weights, strict=True):
            if w is None:
                continue
            sent_RG = w.new_full((self._group.size(), *slots_G.shape), float("nan"))
            weights.send_weights(w.detach(), expert_RG, sent_RG.unbind(), rank)
            received_RG = _exchanged(sent_RG, self._group)
            for slot, expert in enumerate(expert_RG[rank].tolist()):
                slots_G[slot] = EMPTY if expert < 0 else received_RG[expert // local, slot]

    ready = None

    def wait_sending(self) -> None:
        """Return at once: weights were sent by a collective."""

    def wait(self, *, second: bool) -> None:
        assert second == self._waits.pop(0), "the first layer is waited for first"

    def send_grads(self, layer: Layer) -> None:
        """Do nothing: `reduce_grads` gathers them."""

    def reduce_grads(
        self, layer: Layer, own: Sequence[Tensor | None], expert_RG: Tensor, *, overlapped: bool
    ) -> None:
        grads = layer_pair(self.grads, layer)
        for grad, grad_G in zip(own, grads, strict=True):
            if grad is not None:
                grad_RG = grad_G.new_empty(self._group.size(), *grad_G.shape)
                dist.all_gather_into_tensor(grad_RG.flatten(0, 1), grad_G, group=self._group)
                weights.reduce_grads(grad, expert_RG, grad_RG.unbind(), self._group.rank())
        for grad_G in grads:
            if grad_G is not None:
                grad_G.fill_(float("nan"))

    def wait_reducing(self) -> None:
        """Return at once: gradients were reduced by a collective."""


def replicating(exchange_of: Callable[..., Any]) -> list[Any]:
    """Patches with which `symm` replicates over them, and over the exchanges of a cache."""

    def control_of(
        connections: Any, group: Any, tokens: int, hidden: int, slots: int, options: Any
    ) -> Any:
        exchange = exchange_of(connections, group, 1, HIDDEN, tokens * slots, options)
        return Control(exchange, torch.device("cpu"))

    @functools.cache
    def unreduced_memory_of(connections: Any, *shape: Any) -> GlooUnreducedMemory:
        return GlooUnreducedMemory(*shape)

    memories: dict[Any, GlooReplicaMemory] = {}

    def replica_memory_of(
        connections: Any, group: Any, slots: int, own: MLPWeights, _: Any
    ) -> GlooReplicaMemory:
        key = (slots, *(None if w is None else w.shape for w in own))
        if key not in memories:
            memories[key] = GlooReplicaMemory(group, slots, own)
        return memories[key]

    return [
        mock.patch.object(symm, "control_of", control_of),
        mock.patch.object(memory, "unreduced_memory_of", unreduced_memory_of),
        mock.patch.object(memory, "replica_memory_of", replica_memory_of),
    ]


def _exchanged(x_R: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Block r to rank r."""
    out = torch.empty_like(x_R)
    dist.all_to_all_single(out, x_R, group=group)
    return out
