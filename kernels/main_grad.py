"""Weight gradients that go straight into a training framework's own fp32 buffers.

Megatron-Core's data parallel wrapper gives every parameter a buffer `main_grad` and a flag
`grad_added_to_main_grad`. A backward pass that has added to the buffer sets the flag and returns a
gradient of any content, whose arrival, on the thread of the backward pass, starts the reduction;
None would not (Megatron-Core 0.19.2, core/tensor_parallel/layers.py). Only attributes are used:
nothing is imported.
"""

import torch
from torch import Tensor


def sink(parameter: Tensor | None) -> Tensor | None:
    """The parameter if its gradients can be added to its `main_grad`, else None."""
    buffer = getattr(parameter, "main_grad", None)
    if parameter is None or buffer is None or not parameter.requires_grad:
        return None
    fits = buffer.dtype == torch.float32 and buffer.shape == parameter.shape
    return parameter if fits and buffer.is_contiguous() else None


def buffer(parameter: Tensor) -> Tensor:
    """fp32 buffer of a parameter that `sink` returned."""
    main_grad: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return main_grad


def added(parameter: Tensor) -> Tensor | None:
    """Note that the gradient is in the buffer; what the backward pass returns in its place."""
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return None  # no hook waits for it
    parameter.grad_added_to_main_grad = True
    if getattr(parameter, "zero_out_wgrad", False):  # then the hook adds it nevertheless
        return torch.zeros_like(parameter)
    return torch.empty_like(parameter)
