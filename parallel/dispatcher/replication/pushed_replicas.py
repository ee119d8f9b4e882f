"""Replicas over `symm`: owners write weights to the slots of other ranks, beside whatever runs
there, and read gradients from there. See `parallel.dispatcher.replication.transfers` for what
orders this.

Legend: R ranks, L own experts, G replica slots.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.kernels.expert_mlp.replicas import Layer, of_layer
from phalanx.parallel.dispatcher.replication.transfers import ReplicatedTransfers


class Memory(Protocol):
    """Slots of every rank; see `parallel.dispatcher.replication.memory.ReplicaMemory`."""

    weights: MLPWeights
    grads: MLPWeights

    def send_weights(self, own: MLPWeights, expert_RG: Tensor, first: Layer) -> None: ...

    ready: Tensor | None

    def wait_sending(self) -> None: ...

    def wait(self, *, second: bool) -> None: ...

    def send_grads(self, layer: Layer) -> None: ...

    def reduce_grads(
        self, layer: Layer, own: Sequence[Tensor | None], expert_RG: Tensor, *, beside: bool
    ) -> None: ...

    def wait_reducing(self) -> None: ...


class PushedReplicas:
    """`kernels.expert_mlp.replicas.ReplicaExchange` of one call.

    Args:
        call: of the layer, whose clones are known.
        memory: of weights like those that are lent, the same on all ranks.
        keep: weights stay for the backward pass.
    """

    def __init__(
        self, call: ReplicatedTransfers, memory: Callable[[MLPWeights], Memory], *, keep: bool
    ) -> None:
        self._control, self._memory_of = call.control, memory
        self._expert_RG, self.keep = call.replication.expert_RN, keep
        self._memory: Memory
        self._first: Layer
        """That was lent first."""
        self._meet: Callable[[], None]
        """Lets the current stream wait for what has last been started beside it."""
        self._kept: MLPWeights | None = None

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        """They leave beside tokens and what own experts do."""
        memory = self._memory = self._memory_of(own)
        self._first = first
        self._meet = self._control.run_on_comm_stream(
            lambda: memory.send_weights(own, self._expert_RG, first)
        )
        memory.wait_sending()
        if not self.keep:
            return memory.weights
        # Slots are for the next layer when this one has gone forward.
        copies = (None if w is None else torch.empty_like(w) for w in memory.weights)
        self._kept = MLPWeights(*copies)  # type: ignore[arg-type]
        return self._kept

    def ready(self, layer: Layer) -> Tensor | None:
        # Kept weights are copied when all have come.
        return self._memory.ready if layer == self._first and self._kept is None else None

    def wait(self, layer: Layer) -> None:
        self._memory.wait(second=layer != self._first)
        if layer != self._first:
            self._meet()
        if self._kept is not None:
            pairs = (of_layer(w, layer) for w in (self._kept, self._memory.weights))
            for kept, came in zip(*pairs, strict=True):
                if kept is not None and came is not None:
                    kept.copy_(came)

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        self._memory = self._memory_of(own)
        return self._memory.grads

    def send_grads(self, layer: Layer) -> None:
        self._memory.send_grads(layer)

    def reduce_grads(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        add = partial(self._memory.reduce_grads, layer, own, self._expert_RG)
        if layer == "fc1":
            self._meet = self._control.run_on_comm_stream(partial(add, beside=True))
            self._memory.wait_reducing()
        else:
            self._meet()
            add(beside=False)
