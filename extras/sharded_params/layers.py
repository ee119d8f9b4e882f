"""When a layer's parameters are gathered, and its gradients summed: hooks of its passes."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.extras.sharded_params.ring import Unit
from phalanx.kernels import wgrad_queue


class _InBackward(torch.autograd.Function):
    """The same values; `call` is called when their gradient is known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        out = x.new_empty(0)
        out.data = x.data  # no view, as pipeline schedules free what a stage returns
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def install(layer: nn.Module, units: Sequence[Unit]) -> None:
    """Hook the passes of a layer, whose first argument or `hidden_states` is its input."""

    def gather(ahead: int) -> None:
        for unit in units:
            unit.ring.need(unit.number)
        for unit in units:
            unit.ring.fetch(unit.number + ahead)

    def begin_backward() -> None:
        gather(-1)
        for unit in units:
            wgrad_queue.submit(partial(unit.ring.open, unit))

    def end_backward() -> None:
        # What computed the layer's weight gradients came after its input, and autograd goes back in
        # that order: they are all there, or in the queue.
        for unit in units:
            reduce = partial(unit.ring.reduce, unit, unit.last)
            wgrad_queue.submit(reduce, follows=unit.parameters)

    def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        gather(+1)
        if not torch.is_grad_enabled():
            return None
        hidden = args[0] if args else named["hidden_states"]
        assert hidden.requires_grad, "the gradients of a layer end with that of its input"
        hidden = _InBackward.apply(hidden, end_backward)
        return ((hidden, *args[1:]), named) if args else (args, named | {"hidden_states": hidden})

    def after(_: nn.Module, args: Any, output: tuple[Any, ...]) -> Any:
        if not torch.is_grad_enabled():
            return None
        hidden, *rest = output
        return _InBackward.apply(hidden, begin_backward), *rest

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after)
    for parameter in (p for unit in units for p in unit.parameters):
        parameter.register_post_accumulate_grad_hook(_arrive)


def _arrive(parameter: Any) -> None:
    """Add the gradient that autograd returns, unless the backward pass has added it."""
    grad, parameter.grad = parameter.grad, None
    if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
        wgrad_queue.submit(lambda: parameter.main_grad.add_(grad))
