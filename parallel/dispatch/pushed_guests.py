"""Guests over `symm`: owners write weights to the slots of other ranks, beside whatever runs there,
and read gradients from there. See `parallel.dispatch.cloned_transfers` for what orders this.

Legend: R ranks, L own experts, G guest slots.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.guests import Layer, of_layer
from phalanx.kernels.expert_mlp.mlp_spec import MLPWeights
from phalanx.parallel.dispatch.cloned_transfers import ClonedTransfers

if TYPE_CHECKING:
    from phalanx.kernels.sm90.exchange.exchange import Transfer


class Memory(Protocol):
    """Slots of every rank; see `parallel.dispatch.clone_memory.GuestMemory`."""

    weights: MLPWeights
    grads: MLPWeights

    def lend(self, own: MLPWeights, expert_RG: Tensor, first: Layer) -> None: ...

    def wait_running(self) -> None: ...

    def wait(self, *, second: bool) -> None: ...

    def take_back(
        self, layer: Layer, own: Sequence[Tensor | None], expert_RG: Tensor, *, beside: bool
    ) -> None: ...


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
        self._first: Layer
        """That was lent first."""
        self._sent: dict[Layer, Transfer] = {}
        """Signals of gradients."""
        self._meet: Callable[[], None]
        """Lets the current stream wait for what has last been started beside it."""
        self._kept: MLPWeights | None = None

    def lend(self, own: MLPWeights, first: Layer) -> MLPWeights:
        """They leave beside tokens and what own experts do."""
        memory = self._memory = self._memory_of(own)
        self._first = first
        self._meet = self._control.aside(lambda: memory.lend(own, self._expert_RG, first))
        memory.wait_running()
        if not self.keep:
            return memory.weights
        # Slots are for the next layer when this one has gone forward.
        copies = (None if w is None else torch.empty_like(w) for w in memory.weights)
        self._kept = MLPWeights(*copies)  # type: ignore[arg-type]
        return self._kept

    def wait(self, layer: Layer) -> None:
        self._memory.wait(second=layer != self._first)
        if layer != self._first:
            self._meet()
        if self._kept is not None:
            pairs = (of_layer(w, layer) for w in (self._kept, self._memory.weights))
            for kept, came in zip(*pairs, strict=True):
                if kept is not None and came is not None:
                    kept.copy_(came)

    def room(self, own: MLPWeights) -> MLPWeights:
        self._memory = self._memory_of(own)
        return self._memory.grads

    def give_back(self, layer: Layer) -> None:
        self._sent[layer] = self._control.send()
        if layer == "fc2":
            # Now, not when own gradients are complete: after a wait there would be no SM left.
            self._control.aside(lambda: self._control.wait(self._sent["fc1"]))

    def take_back(self, layer: Layer, own: Sequence[Tensor | None]) -> None:
        add = partial(self._memory.take_back, layer, own, self._expert_RG)
        if layer == "fc1":
            self._meet = self._control.aside(partial(add, beside=True))
        else:
            self._meet()
            self._control.wait(self._sent["fc2"])
            add(beside=False)
