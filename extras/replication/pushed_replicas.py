"""Replicas over `symm`: owners write weights to other ranks' slots and read gradients from there.

Both overlap other kernels; `extras.replication.transfers` states what orders them.

Legend: R ranks, L own experts, G replica slots.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from phalanx.extras.replication.control import Control
from phalanx.extras.replication.kernels.replication_plan import ReplicationPlan
from phalanx.kernels.expert_mlp.mlp_spec import Layer, MLPWeights, layer_pair


class Memory(Protocol):
    """Replica slots of every rank, as `extras.replication.memory.ReplicaMemory`."""

    weights: MLPWeights
    grads: MLPWeights

    def send_weights(self, own: MLPWeights, expert_RG: Tensor, first: Layer) -> None: ...

    @property
    def ready(self) -> Tensor | None: ...

    def wait_sending(self) -> None: ...

    def wait(self, *, second: bool) -> None: ...

    def send_grads(self, layer: Layer) -> None: ...

    def reduce_grads(
        self, layer: Layer, own: Sequence[Tensor | None], expert_RG: Tensor, *, overlapped: bool
    ) -> None: ...

    def wait_reducing(self) -> None: ...


class PushedReplicas:
    """`extras.replication.kernels.exchange.ReplicaExchange` of one call.

    Args:
        control: exchange with a communication stream.
        plan: replication plan of the micro-batch.
        memory: function of weights that returns the memory of slots for them, the same on all
            ranks.
        keep: True if weights are saved for the backward pass.
    """

    def __init__(
        self,
        control: Control,
        plan: ReplicationPlan,
        memory: Callable[[MLPWeights], Memory],
        *,
        keep: bool,
    ) -> None:
        self._control, self._memory_of = control, memory
        self._expert_RG, self.keep = plan.expert_RN, keep
        self._memory: Memory
        self._first: Layer
        """Layer whose weights were sent first."""
        self._join: Callable[[], None]
        """Function that lets the current stream wait for the communication stream."""
        self._saved: MLPWeights | None = None

    def send_weights(self, own: MLPWeights, first: Layer) -> MLPWeights:
        """Start to send own weights, which overlaps tokens and own experts."""
        memory = self._memory = self._memory_of(own)
        self._first = first
        self._join = self._control.run_on_comm_stream(
            lambda: memory.send_weights(own, self._expert_RG, first)
        )
        memory.wait_sending()
        if not self.keep:
            return memory.weights
        # The next layer takes the slots after this one's forward pass.
        copies = (None if w is None else torch.empty_like(w) for w in memory.weights)
        self._saved = MLPWeights(*copies)  # type: ignore[arg-type]
        return self._saved

    def ready(self, layer: Layer) -> Tensor | None:
        # Saved weights are copied once all have arrived.
        return self._memory.ready if layer == self._first and self._saved is None else None

    def wait(self, layer: Layer) -> None:
        self._memory.wait(second=layer != self._first)
        if layer != self._first:
            self._join()
        if self._saved is not None:
            pairs = (layer_pair(w, layer) for w in (self._saved, self._memory.weights))
            for saved, received in zip(*pairs, strict=True):
                if saved is not None and received is not None:
                    saved.copy_(received)

    def grad_buffer(self, own: MLPWeights) -> MLPWeights:
        self._memory = self._memory_of(own)
        return self._memory.grads

    def send_grads(self, layer: Layer) -> None:
        self._memory.send_grads(layer)

    def reduce_grads(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        add = partial(self._memory.reduce_grads, layer, own, self._expert_RG)
        if layer == "fc1":
            self._join = self._control.run_on_comm_stream(partial(add, overlapped=True))
            self._memory.wait_reducing()
        else:
            self._join()
            add(overlapped=False)
