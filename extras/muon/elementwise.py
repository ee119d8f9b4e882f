"""Muon's momentum and update of a matrix, one pass each.

Momentum is a running mean of gradients, in fp32 or bf16; the arithmetic is fp32. Gradients are
clipped as they are read. A master copy may be held as weight and remainder, as in
`kernels.elementwise.adam`. Triton kernels on NVIDIA GPUs, 8 bytes of traffic a parameter before and
12 after with all in bf16, where torch's operations take 42 and 52; elsewhere torch.
"""

import torch
from torch import Tensor

from phalanx.kernels.elementwise.adam import merged, split_


@torch.no_grad()
def momentum(
    grad: Tensor,
    buffer: Tensor,
    *,
    keep: float,
    nesterov: bool,
    clip_coef: float | Tensor = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Add a gradient to the running mean; returns the matrix to orthogonalize.

    That is the mean, not rounded to the buffer's dtype, or Nesterov's form of it, in `dtype`.

    Args:
        grad: fp32 or bf16, contiguous, of any shape.
        buffer: fp32 or bf16, like `grad`; overwritten with keep * buffer + (1 - keep) * grad.
        nesterov: the gradient is mixed in again, as in Nesterov's method.
        clip_coef: factor on the gradient; or fp32 [] on its device, which a CUDA graph reads anew.
    """
    _check(grad, buffer)
    if grad.is_cuda:
        from phalanx.extras.muon.elementwise_triton import launch_momentum

        out = torch.empty_like(grad, dtype=dtype)
        launch_momentum(grad, buffer, out, keep, nesterov, _on_device(clip_coef, grad))
        return out
    grad = grad.float() * clip_coef
    mean = buffer.float().lerp(grad, 1 - keep)
    buffer.copy_(mean)
    return (grad.lerp(mean, keep) if nesterov else mean).to(dtype)


@torch.no_grad()
def move_(
    param: Tensor,
    update: Tensor,
    *,
    kept: float | Tensor,
    rate: float | Tensor,
    remainder: Tensor | None = None,
) -> None:
    """kept * param - rate * update, in place; both factors are numbers or fp32 [] on the device.

    Args:
        param: fp32, or bf16 with a remainder; contiguous, of any shape.
        update: fp32 or bf16, like `param`.
        remainder: int16 low bits of the master copy of `param`, which is updated.
    """
    _check(param, update, *(() if remainder is None else (remainder,)))
    if param.is_cuda:
        from phalanx.extras.muon.elementwise_triton import launch_move

        launch_move(param, update, _on_device(kept, param), _on_device(rate, param), remainder)
        return
    master = param if remainder is None else merged(param, remainder)
    master.mul_(kept).sub_(update.float() * rate)
    if remainder is not None:
        split_(master, param, remainder)


def _on_device(number: float | Tensor, beside: Tensor) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.full((), number, dtype=torch.float32, device=beside.device)


def _check(*tensors: Tensor) -> None:
    if not all(t.is_contiguous() and t.shape == tensors[0].shape for t in tensors):
        raise ValueError("Muon's tensors are contiguous and of one shape")
