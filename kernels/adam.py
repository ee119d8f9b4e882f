"""AdamW with moments in bf16: one pass over parameter, gradient and both moments.

Moments are read in bf16, the update is fp32, and they are rounded to nearest on the way back, as
in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2). Gradients are clipped as they are read, with the
same bits as by a pass of its own before. A Triton kernel on NVIDIA GPUs; elsewhere torch, in
slices, so that no moment exists in fp32 as a whole.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_SLICE = 16 << 20
"""Elements that torch works on at a time: 64 MiB of fp32."""


@dataclass(frozen=True)
class Update:
    """Numbers of one AdamW step (arXiv 1711.05101)."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    """Counted from 1, this one included."""
    clip_coef: float = 1.0
    """Factor on the gradient, in fp32 and rounded to fp32: that of clipping by total norm."""

    @property
    def kept(self) -> float:
        """Of a parameter, by weight decay."""
        return 1 - self.lr * self.weight_decay

    @property
    def rate(self) -> float:
        """Learning rate, with the first moment's bias mended."""
        return self.lr / (1 - self.beta1**self.step)

    @property
    def scale(self) -> float:
        """Mends the bias of the second moment's root."""
        return (1 - self.beta2**self.step) ** -0.5


@torch.no_grad()
def update_(param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, how: Update) -> None:
    """Update a parameter and its moments in place.

    Args:
        param: fp32, contiguous, of any shape, as the others are.
        grad: fp32 or bf16; stays as it is.
        mean, square: bf16 moments.
        how: numbers of this step.

    Raises:
        ValueError: one of them is not contiguous.
    """
    if not all(t.is_contiguous() for t in (param, grad, mean, square)):
        raise ValueError("bf16 moments need contiguous parameters and gradients")
    flat = p, g, m16, v16 = tuple(t.detach().view(-1) for t in (param, grad, mean, square))
    if param.is_cuda:
        from kernels.adam_triton import launch

        launch(p, g, m16, v16, how)
        return
    for p, g, m16, v16 in zip(*(t.split(_SLICE) for t in flat), strict=True):
        g = g.float() * how.clip_coef
        m = m16.float().lerp_(g, 1 - how.beta1)
        v = v16.float().mul_(how.beta2).addcmul_(g, g, value=1 - how.beta2)
        m16.copy_(m)
        v16.copy_(v)
        p.mul_(how.kept)
        p.addcdiv_(m, v.sqrt_().mul_(how.scale).add_(how.eps), value=-how.rate)
