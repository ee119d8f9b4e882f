"""Computing again in the backward pass what was given up in the forward pass.

`checkpoint` keeps the inputs of a function and nothing that it saves. A `RecomputedRegion` also gives up its
results, which whoever comes next has saved; `DroppedTensors` gives up nothing but results. Both are filled
again when told to, before anyone reads them. Nothing here looks at random states: what is computed
again must not be random. All of it can be captured in a CUDA graph.

As Megatron-Core's `tensor_parallel.checkpoint` and `CheckpointWithoutOutput`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx.parallel.memory.storages import alias, empty, fill, storages

Function = Callable[..., Any]


def checkpoint(function: Function, *inputs: Tensor, addend: Tensor | None = None) -> Any:
    """`function(*inputs)`, of which only the inputs are kept; a tensor or several.

    Args:
        function: what is computed again.
        inputs: its arguments both times.
        addend: a last argument that `function` adds to its one result. It is not kept, and what is
            computed again does without: its gradient is the result's.
    """
    return _Checkpoint.apply(function, addend, *inputs)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Function, addend: Tensor | None, *inputs: Tensor) -> Any:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        with torch.no_grad():
            return function(*inputs) if addend is None else function(*inputs, addend)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = _detached(ctx.saved_tensors)
        with torch.enable_grad():
            made = _several(ctx.function(*inputs))
        of_addend = gradients[0] if ctx.needs_input_grad[1] else None
        return None, of_addend, *_gradients(made, gradients, inputs)


class RecomputedRegion:
    """A function whose results are given up after their use, with all that it saves.

    Args:
        function: of tensors, to tensors that have their storages for themselves.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._node: Any = None
        self._results: tuple[Tensor, ...] = ()
        self._sizes: list[int] = []
        self.inputs: tuple[Tensor, ...] = ()
        """Of the second time, and below its results, for the gradients."""
        self.made: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> Any:
        """The results."""
        made = _Region.apply(self, *inputs)
        # Aliases: the results themselves hold the node, which holds this.
        self._results = tuple(alias(result) for result in _several(made))
        return made

    def run(self, node: Any, inputs: Sequence[Tensor]) -> Any:
        """The first time."""
        self._node = node
        with torch.no_grad():
            return self._function(*inputs)

    def drop(self) -> None:
        """Give the results up: nobody reads them before `fill`."""
        self._sizes = [result.untyped_storage().nbytes() for result in self._results]
        for storage in storages(self._results):
            empty(storage)

    def fill(self) -> None:
        """Compute again, and put the results where they were."""
        self.inputs = _detached(self._node.saved_tensors)
        with torch.enable_grad():
            self.made = _several(self._function(*self.inputs))
        with torch.no_grad():
            for result, value, size in zip(self._results, self.made, self._sizes, strict=True):
                fill(result, value, size)
        self._node, self._results = None, ()


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: RecomputedRegion, *inputs: Tensor) -> Any:
        ctx.region = region
        ctx.save_for_backward(*inputs)
        return region.run(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        region: RecomputedRegion = ctx.region
        if not region.made:
            raise RuntimeError("a region's results have not been filled before their gradients")
        made, inputs = region.made, region.inputs
        region.made, region.inputs = (), ()
        return None, *_gradients(made, gradients, inputs)


class DroppedTensors:
    """Tensors that are given up, and what makes them again.

    Args:
        tensors: with storages for themselves.
        remake: makes tensors of the same values; called without gradients.
    """

    def __init__(self, tensors: Sequence[Tensor], remake: Callable[[], Sequence[Tensor]]) -> None:
        self._tensors = [alias(tensor) for tensor in tensors]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self._remake: Callable[[], Sequence[Tensor]] | None = remake

    def drop(self) -> None:
        """Give them up: nobody reads them before `fill`."""
        for storage in storages(self._tensors):
            empty(storage)

    def fill(self) -> None:
        """Make them again, where they were."""
        assert self._remake is not None
        with torch.no_grad():
            for tensor, value, size in zip(self._tensors, self._remake(), self._sizes, strict=True):
                fill(tensor, value, size)
        self._tensors, self._remake = [], None


def _several(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)


def _detached(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)


def _gradients(
    made: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Of inputs; those of parameters are added where they belong."""
    pairs = zip(made, gradients, strict=True)
    wanted = [(m, g) for m, g in pairs if m.requires_grad and g is not None]
    if wanted:
        torch.autograd.backward([m for m, _ in wanted], [g for _, g in wanted])
    return [t.grad for t in inputs]
