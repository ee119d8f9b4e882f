"""Gradients that are written directly to a training framework's buffers, and facts on parameters.

Megatron-Core's data parallel wrapper gives every parameter a buffer `main_grad` and a flag
`grad_added_to_main_grad`. A backward pass that has added to the buffer sets the flag and returns a
gradient of any content, whose arrival, on the thread of the backward pass, starts the reduction;
None would not (Megatron-Core 0.19.2, core/tensor_parallel/layers.py). Only attributes are used:
nothing is imported. A buffer need not be cleared before a step: after `replace_next` the first
gradient overwrites it, which saves a pass that writes zeros, and the reads of the first addition.

Attributes that Megatron-Core reads or writes stay on the parameter itself: `allreduce`,
`sequence_parallel`, `tensor_model_parallel`, `partition_dim`, `no_weight_decay`, `main_grad`,
`grad_added_to_main_grad`, `zero_out_wgrad`. All else that one part of Phalanx notes for another is
a field of `ParameterFacts`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.kernels import wgrad_queue

_ATTRIBUTE = "phalanx_facts"


@dataclass
class ParameterFacts:
    """Facts on a parameter, or on the tensor that its optimizer updates in place of it."""

    gated_run: int = 0
    """Channels of a run of gates or ups in weights with a `ChannelOrder`; 0 for [gate; up]. Set by
    `moe.experts`."""
    adds_to_main_grad: bool = False  # backward adds every gradient; `moe.experts` sets it
    replaces_main_grad: bool = False  # the next gradient replaces the contents
    fp8_copies: Any = None  # cached (`kernels.expert_mlp.fp8`) until the next update
    matrices: Any = None  # shapes of its matrices, for an optimizer that updates each as a whole


def facts_of(parameter: Tensor) -> ParameterFacts:
    """Facts on a parameter; defaults are attached to it at the first call."""
    facts: ParameterFacts | None = getattr(parameter, _ATTRIBUTE, None)
    if facts is None:
        facts = ParameterFacts()
        setattr(parameter, _ATTRIBUTE, facts)
    return facts


class Buffer(NamedTuple):
    """Destination of a gradient."""

    out: Tensor  # fp32, or of the parameter's dtype
    add: bool  # accumulate into `out`; otherwise overwrite it
    zeros: bool = True  # overwriting, zeros for experts without rows; otherwise undefined


def takes(parameter: Tensor | None) -> bool:
    """True if gradients of the parameter can be added to its `main_grad`."""
    buffer = getattr(parameter, "main_grad", None)
    if parameter is None or buffer is None or not parameter.requires_grad:
        return False
    fits = buffer.dtype in (torch.float32, parameter.dtype) and buffer.shape == parameter.shape
    return fits and buffer.is_contiguous()


def buffer(parameter: Tensor) -> Buffer:
    """Destination of the next gradient of a parameter for which `takes` is true."""
    replaces = facts_of(parameter).replaces_main_grad
    return Buffer(parameter.main_grad, not replaces)  # type: ignore[attr-defined]


def replace_next(parameters: Iterable[Tensor]) -> None:
    """Have the next gradient of each parameter overwrite its buffer; `takes` must hold for all."""
    for parameter in parameters:
        facts_of(parameter).replaces_main_grad = True


def write(parameter: Tensor, compute: Callable[[Buffer], object]) -> Tensor | None:
    """Have `compute` write a gradient, now or from the queue (`kernels.wgrad_queue`).

    What it reads stays as it is until the end of the step. Returns `arrival`.
    """

    def work() -> None:
        compute(buffer(parameter))
        added(parameter)

    wgrad_queue.submit(work)
    return arrival(parameter)


def added(parameter: Tensor) -> None:
    """Note that a gradient is in the buffer."""
    facts_of(parameter).replaces_main_grad = False


def arrival(parameter: Tensor) -> Tensor | None:
    """The backward pass's result for a parameter with its gradient, soon, in its buffer."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None  # no hook waits for it
    parameter.grad_added_to_main_grad = True
    if getattr(parameter, "zero_out_wgrad", False):  # then the hook adds it nevertheless
        return torch.zeros_like(parameter)
    return torch.empty_like(parameter)
