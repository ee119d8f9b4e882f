"""AdamW with moments in bf16: one pass over parameter, gradient and both moments.

Moments are read in bf16, the update is fp32, and they are rounded to nearest on the way back, as in
DeepSeek-V3 (arXiv 2412.19437, section 3.3.2). Gradients are clipped as they are read, with the bits
of a pass of its own before. A Triton kernel on NVIDIA GPUs; elsewhere torch, in slices, so that no
moment exists in fp32 as a whole.

FusedAdam of Transformer Engine has such moments too, but does not clip: that is a pass over all
gradients. On an H200 its step takes 1.8 to 2.1 times as long (docs/measured/kernels/libraries.md).
With moments in fp32 torch's fused kernel does the step, and takes as long as FusedAdam.

A master copy in fp32 may be held as the bf16 weight and the 16 bits that this lacks, as FusedAdam
does with `store_param_remainders`. The remainder is the master's lower 16 bits as an int16; the
weight is the upper bits of the master minus the remainder: the master rounded to nearest, ties away
from zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_SLICE = 16 << 20  # elements that torch works on at a time: 64 MiB of fp32


@dataclass(frozen=True)
class Update:
    """Numbers of one AdamW step (arXiv 1711.05101)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int  # counted from 1, this one included
    clip_coef: float = 1.0  # fp32 factor on the gradient: that of clipping by total norm
    on_device: Tensor | None = None  # `per_step` as fp32 [4], for CUDA graphs; None: it is copied

    @property
    def per_step(self) -> tuple[float, float, float, float]:
        """The numbers that differ between steps: decay, rate, scale and clip_coef."""
        return self.decay, self.rate, self.scale, self.clip_coef

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay

    @property
    def rate(self) -> float:
        """Learning rate, with the first moment's bias corrected."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def scale(self) -> float:
        """Correction of the second moment's root."""
        return (1 - self.beta2**self.step) ** -0.5


def split_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write an fp32 master copy as bf16 weight, maybe rounded to infinity, and int16 remainder."""
    bits = master.view(torch.int32)
    remainder.copy_(bits.to(torch.int16))
    weight.view(torch.int16).copy_((bits - remainder) >> 16)


def merged(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master copy that `split_` took; of a weight alone (remainder 0) the same number."""
    return ((weight.view(torch.int16).int() << 16) + remainder).view(torch.float32)


@torch.no_grad()
def update_(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    update: Update,
    remainder: Tensor | None = None,
) -> None:
    """Update a parameter and its moments in place. Tensors are contiguous, of any shape.

    Args:
        param: fp32, or bf16 with a remainder.
        grad: fp32 or bf16; not changed.
        mean, square: bf16 moments.
        remainder: int16 low bits of the master copy of `param`, which is updated.

    Raises:
        ValueError: a tensor is not contiguous, or `param` is fp32 with a remainder, or of another
            dtype without one.
    """
    tensors = (param, grad, mean, square, *(() if remainder is None else (remainder,)))
    if not all(t.is_contiguous() for t in tensors):
        raise ValueError("bf16 moments need contiguous parameters and gradients")
    if param.dtype != (torch.float32 if remainder is None else torch.bfloat16):
        raise ValueError("a parameter has a remainder if it is bf16, and none if it is fp32")
    flat = tuple(t.detach().view(-1) for t in tensors)
    if param.is_cuda:
        from phalanx.kernels.elementwise.adam_triton import launch

        p, g, m16, v16, *rest = flat
        launch(p, g, m16, v16, update, *rest)
        return
    for weight, g, m16, v16, *rest in zip(*(t.split(_SLICE) for t in flat), strict=True):
        p = merged(weight, *rest) if rest else weight
        g = g.float() * update.clip_coef
        m = m16.float().lerp_(g, 1 - update.beta1)
        v = v16.float().mul_(update.beta2).addcmul_(g, g, value=1 - update.beta2)
        m16.copy_(m)
        v16.copy_(v)
        p.mul_(update.decay)
        p.addcdiv_(m, v.sqrt_().mul_(update.scale).add_(update.eps), value=-update.rate)
        if rest:
            split_(p, weight, *rest)
