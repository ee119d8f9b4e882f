"""Recomputation, in the backward pass, of what was freed in the forward pass.

`checkpoint` saves the inputs of a function and none of its intermediate tensors. A
`RecomputedRegion` also frees its results, which later code has saved; `DroppedTensors` frees
results alone. Both are refilled when the caller says so. What is recomputed must not be random. All
of it can be captured in a CUDA graph. Counterparts of Megatron-Core's `tensor_parallel.checkpoint`
and `CheckpointWithoutOutput`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Distinct storages of the tensors, without empty ones."""
    distinct = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
    return [storage for storage in distinct.values() if storage.nbytes()]


def free(storage: UntypedStorage) -> None:
    """Free the memory; tensors on it keep their shape and can be refilled."""
    storage.resize_(0)


def refill(tensor: Tensor, value: Tensor, size: int) -> None:
    """Write `value` to the storage of `tensor`, of `size` bytes, which may have been freed.

    Through another tensor on the storage, so that autograd sees no change.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() != size:
        storage.resize_(size)
    alias(tensor).copy_(value)


def alias(tensor: Tensor) -> Tensor:
    """Another tensor on the same storage, unknown to autograd."""
    out = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return out.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def as_bytes(storage: UntypedStorage) -> Tensor:
    """All bytes of a storage, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


Function = Callable[..., Any]


def checkpoint(function: Function, *inputs: Tensor, addend: Tensor | None = None) -> Any:
    """Result of `function(*inputs)`, a tensor or several, of which only the inputs are saved.

    `function` adds `addend`, its last argument, to its one result. It is not saved, and the
    recomputation does without it: its gradient is the result's.
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
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        inputs = _detached(ctx.saved_tensors)
        with torch.enable_grad():
            outputs = _as_tuple(ctx.function(*inputs))
        addend_grad = grads[0] if ctx.needs_input_grad[1] else None
        return None, addend_grad, *_input_grads(outputs, grads, inputs)


class RecomputedRegion:
    """A function whose results, and all that it saves, are freed after their use.

    Its results share their storages with no other tensor.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._node: Any = None
        self._results: tuple[Tensor, ...] = ()
        self._sizes: list[int] = []
        self.inputs: tuple[Tensor, ...] = ()  # with gradients; empty before `fill`
        self.outputs: tuple[Tensor, ...] = ()  # with gradients; empty before `fill`

    def __call__(self, *inputs: Tensor) -> Any:
        outputs = _Region.apply(self, *inputs)
        # Aliases: the results themselves hold the node, which holds this.
        self._results = tuple(alias(result) for result in _as_tuple(outputs))
        return outputs

    def forward(self, node: Any, inputs: Sequence[Tensor]) -> Any:
        """Results in the forward pass; `node` has saved the inputs."""
        self._node = node
        with torch.no_grad():
            return self._function(*inputs)

    def drop(self) -> None:
        """Free the results, which nobody reads before `fill`."""
        self._sizes = [result.untyped_storage().nbytes() for result in self._results]
        for storage in storages(self._results):
            free(storage)

    def fill(self) -> None:
        """Recompute the results into the storages that they had."""
        self.inputs = _detached(self._node.saved_tensors)
        with torch.enable_grad():
            self.outputs = _as_tuple(self._function(*self.inputs))
        with torch.no_grad():
            for result, value, size in zip(self._results, self.outputs, self._sizes, strict=True):
                refill(result, value, size)
        self._node, self._results = None, ()


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: RecomputedRegion, *inputs: Tensor) -> Any:
        ctx.region = region
        ctx.save_for_backward(*inputs)
        return region.forward(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        region: RecomputedRegion = ctx.region
        if not region.outputs:
            raise RuntimeError("a region's results have not been filled before their gradients")
        outputs, inputs = region.outputs, region.inputs
        region.outputs, region.inputs = (), ()
        return None, *_input_grads(outputs, grads, inputs)


class DroppedTensors:
    """Tensors that are freed, and the function that recomputes their values without gradients.

    They share their storages with no other tensor.
    """

    def __init__(
        self, tensors: Sequence[Tensor], recompute: Callable[[], Sequence[Tensor]]
    ) -> None:
        self._tensors = [alias(tensor) for tensor in tensors]
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        self._recompute: Callable[[], Sequence[Tensor]] | None = recompute

    def drop(self) -> None:
        """Free the tensors, which nobody reads before `fill`."""
        for storage in storages(self._tensors):
            free(storage)

    def fill(self) -> None:
        """Recompute the tensors into the storages that they had."""
        assert self._recompute is not None
        with torch.no_grad():
            values = self._recompute()
            for tensor, value, size in zip(self._tensors, values, self._sizes, strict=True):
                refill(tensor, value, size)
        self._tensors, self._recompute = [], None


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _detached(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)


def _input_grads(
    outputs: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    pairs = zip(outputs, grads, strict=True)
    wanted = [(out, grad) for out, grad in pairs if out.requires_grad and grad is not None]
    if wanted:
        torch.autograd.backward([out for out, _ in wanted], [grad for _, grad in wanted])
    return [t.grad for t in inputs]
