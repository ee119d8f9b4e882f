"""Guests over `symm`: owners write weights to the slots of other ranks, beside whatever runs there,
and read gradients from there. See `parallel.dispatch.cloned_transfers` for what orders this.

Legend: R ranks, L own experts, G guest slots.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.parallel.dispatch.cloned_transfers import ClonedTransfers

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Transfer


class Memory(Protocol):
    """Slots of every rank; see `parallel.dispatch.clone_memory.GuestMemory`."""

    weights: MLPWeights
    grads: MLPWeights

    def lend(self, own: MLPWeights, expert_RG: Tensor) -> None: ...

    def take_back(self, own: Sequence[Tensor | None], expert_RG: Tensor) -> None: ...


class PushedGuests:
    """`kernels.expert_mlp.guests.Guests` of one call.

    Args:
        call: of the layer, whose clones are known.
        memory: of weights like those that are lent, the same on all ranks.
        keep: weights stay for the backward pass.
    """

    def __init__(
        self, call: ClonedTransfers, memory: Callable[[MLPWeights], Memory], *, keep: bool
    ) -> None:
        self._control, self._memory_of = call.control, memory
        self._expert_RG, self.keep = call.clones.expert_RN, keep
        self._memory: Memory
        self._sent: Transfer
        self._kept: MLPWeights | None = None

    def lend(self, own: MLPWeights) -> MLPWeights:
        """They leave beside tokens and what own experts do."""
        memory = self._memory = self._memory_of(own)
        self._sent = self._control.send(first=lambda: memory.lend(own, self._expert_RG))
        if not self.keep:
            return memory.weights
        # Slots are for the next layer when this one has gone forward.
        copies = (None if w is None else torch.empty_like(w) for w in memory.weights)
        self._kept = MLPWeights(*copies)  # type: ignore[arg-type]
        return self._kept

    def wait(self) -> None:
        self._control.wait(self._sent)
        if self._kept is not None:
            for kept, came in zip(self._kept, self._memory.weights, strict=True):
                if kept is not None and came is not None:
                    kept.copy_(came)
            self._kept = None

    def room(self, own: MLPWeights) -> MLPWeights:
        self._memory = self._memory_of(own)
        return self._memory.grads

    def give_back(self) -> None:
        self._sent = self._control.send()

    def take_back(self, own: Sequence[Tensor | None]) -> None:
        self._control.wait(self._sent)
        self._memory.take_back(own, self._expert_RG)
