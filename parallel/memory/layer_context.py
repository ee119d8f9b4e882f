"""One forward pass of a layer, and what becomes of what its modules leave for the backward pass.

The layer opens a pass (`enter_layer`) and closes parts of it with the tensor whose gradient comes
before theirs (`LayerContext.close`). Modules inside ask for the pass that they are in (`current_layer_context`) and name
what they make; whether it is kept, computed again or moved is the plan's to say. Where nothing is
to be done, or without gradients, the pass does nothing.
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
    """By names of what layers leave (configs/memory.py)."""

    again: frozenset[str] = frozenset()
    """Computed again."""
    offload: frozenset[str] = frozenset()
    """Moved to host memory."""


KEEP_ALL = MemoryPlan()
"""All of it stays."""


class LayerContext:
    """A forward pass.

    Args:
        plan: of the layer.
        place: the layer's number; consecutive layers follow one another.
    """

    def __init__(self, plan: MemoryPlan, place: int = 0) -> None:
        self._plan, self._place = plan, place
        self._open: list[RecomputedRegion | DroppedTensors] = []
        self._moving: list[Tensor] = []

    def again(self, name: str) -> bool:
        """Whether that is computed again."""
        return name in self._plan.again

    def moves(self, name: str) -> bool:
        """Whether that is moved to host memory."""
        return name in self._plan.offload

    def region(self, name: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
        """`function(*inputs)`; computed again, its results are given up as well, so that they need
        storages for themselves, and nobody may read them behind the next `close`."""
        if not self.again(name):
            return function(*inputs)
        region = RecomputedRegion(function)
        self._open.append(region)
        return region(*inputs)

    def drop(
        self, name: str, tensors: Sequence[Tensor], remake: Callable[[], Sequence[Tensor]]
    ) -> None:
        """Tensors with storages for themselves that nobody reads behind the next `close`."""
        if self.again(name):
            self._open.append(DroppedTensors(tensors, remake))

    def move(self, name: str, *tensors: Tensor) -> None:
        """Tensors that nobody reads behind the layer's end until its backward pass."""
        if self.moves(name):
            self._moving += tensors

    def close(self, tensor: Tensor) -> None:
        """Give up what has been named since the last `close`; it is there again when the gradient
        of `tensor` is. What is named first is made first."""
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
        """`close` of the layer's last result, and what is moved begins to leave."""
        if self._moving:
            there = offloader(tensor.device)
            group: OffloadedGroup = there.send(self._moving, self._place)
            self._moving = []
            tensor.register_hook(lambda _: there.need(group))
        self.close(tensor)


_NOTHING = LayerContext(KEEP_ALL)
_STATE = threading.local()


def current_layer_context() -> LayerContext:
    """The pass that this code is in; none where nothing is saved, as inside `checkpoint`."""
    found: LayerContext = getattr(_STATE, "now", _NOTHING)
    return found if torch.is_grad_enabled() else _NOTHING


@contextmanager
def enter_layer(plan: MemoryPlan, place: int) -> Iterator[LayerContext]:
    """Inside, `current_layer_context` is a pass of a layer; without gradients it is none."""
    before = getattr(_STATE, "now", _NOTHING)
    _STATE.current_layer_context = (
        LayerContext(plan, place) if torch.is_grad_enabled() else _NOTHING
    )
    try:
        yield _STATE.current_layer_context
    finally:
        _STATE.current_layer_context = before
