"""Memory of one forward pass of a layer: what its modules leave for the backward pass.

The layer enters a context (`enter_layer`), passes it to its modules, and closes parts of it with
the tensor whose gradient comes before theirs (`LayerContext.close`). The modules name what they
produce; the plan decides whether it is saved, recomputed or offloaded. Without gradients, or where
all is saved, a context does nothing. Attention alone asks for `current_layer_context`:
Megatron-Core's SelfAttention calls its parts with fixed signatures.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.memory.offload import OffloadedGroup, offloader
from phalanx.parallel.memory.recompute import DroppedTensors, RecomputedRegion


@dataclass(frozen=True)
class MemoryPlan:
    """Treatment of saved tensors, by the names of configs/tables/activation_memory.py."""

    recompute: frozenset[str] = frozenset()  # names of what is recomputed
    offload: frozenset[str] = frozenset()  # names of what is moved to host memory


KEEP_ALL = MemoryPlan()  # plan that neither recomputes nor offloads anything


class LayerContext:
    """Memory of one forward pass of a layer; consecutive layers have consecutive numbers."""

    def __init__(self, plan: MemoryPlan, number: int = 0) -> None:
        self._plan, self._number = plan, number
        self._open: list[RecomputedRegion | DroppedTensors] = []
        self._offloaded: list[Tensor] = []

    def recomputes(self, name: str) -> bool:
        return name in self._plan.recompute

    def offloads(self, name: str) -> bool:
        return name in self._plan.offload

    def region(self, name: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """Result of `function(*inputs)`, freed at the next `close` if the plan recomputes `name`.

        The results must share their storages with no other tensor, and nobody reads them after it.
        """
        if not self.recomputes(name):
            return function(*inputs)
        region = RecomputedRegion(function)
        self._open.append(region)
        return region(*inputs)

    def drop(
        self, name: str, tensors: Sequence[Tensor], recompute: Callable[[], Sequence[Tensor]]
    ) -> None:
        """Free tensors at the next `close` if the plan recomputes `name`; as for `region`."""
        if self.recomputes(name):
            self._open.append(DroppedTensors(tensors, recompute))

    def offload(self, name: str, *tensors: Tensor) -> None:
        """Move tensors, unread until backward, to host memory at `end` if the plan says so."""
        if self.offloads(name):
            self._offloaded += tensors

    def close(self, tensor: Tensor) -> None:
        """Free what was named since the last `close`, until the gradient of `tensor` is known.

        It is recomputed at that time, in the order in which it was named.
        """
        dropped, self._open = self._open, []
        if not dropped:
            return
        for part in reversed(dropped):
            part.drop()

        def fill(_: Tensor) -> None:
            for part in dropped:
                part.fill()

        tensor.register_hook(fill)

    def end(self, tensor: Tensor) -> None:
        """`close` with the layer's last result, and start the copies of what is offloaded."""
        if self._offloaded:
            device_offloader = offloader(tensor.device)
            group: OffloadedGroup = device_offloader.send(self._offloaded, self._number)
            self._offloaded = []
            tensor.register_hook(lambda _: device_offloader.need(group))
        self.close(tensor)


INACTIVE = LayerContext(KEEP_ALL)
"""Context that saves everything: outside of layers, and inside `checkpoint`."""
_STATE = threading.local()


def current_layer_context() -> LayerContext:
    """Context of the layer that runs in this thread, for attention; or `INACTIVE`."""
    context: LayerContext = getattr(_STATE, "context", INACTIVE)
    return context if torch.is_grad_enabled() else INACTIVE


@contextmanager
def enter_layer(plan: MemoryPlan, number: int) -> Iterator[LayerContext]:
    """Context of a forward pass of a layer; `INACTIVE` without gradients."""
    outer = getattr(_STATE, "context", INACTIVE)
    context = LayerContext(plan, number) if torch.is_grad_enabled() else INACTIVE
    _STATE.context = context
    try:
        yield context
    finally:
        _STATE.context = outer
