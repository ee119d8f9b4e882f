"""Copy of the weights of experts from [E, in, out] to [E, out, in], and back.

torch copies an array whose lines are channels in the other order, with gate and up channels that
alternate, at a sixth of the speed of memory; tiles in Triton on NVIDIA GPUs have whole lines on
both sides. Elsewhere torch.

Legend: E experts, D and H channels; H = 2F if gate and up channels alternate.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def transposed(x: Tensor, *, interleaved: bool, back: bool) -> Tensor:
    """Return a contiguous copy in the other order; differentiable once.

    Args:
        x: [E, D, H]; with `back` [E, H, D].
        interleaved: channels of [E, D, H] are gate 0, up 0, gate 1, ...; those of [E, H, D] are all
            gates, and then all ups.
        back: from [E, H, D] to [E, D, H].

    Returns:
        [E, H, D]; with `back` [E, D, H].
    """
    out: Tensor = _Transposed.apply(x, interleaved, back)
    return out


class _Transposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, interleaved: bool, back: bool) -> Tensor:
        ctx.interleaved, ctx.back = interleaved, back
        return _copy(x.contiguous(), interleaved, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _copy(grad.contiguous(), ctx.interleaved, not ctx.back), None, None


def _copy(x: Tensor, interleaved: bool, back: bool) -> Tensor:
    if x.is_cuda:
        from phalanx.kernels.elementwise.transpose_triton import launch

        return launch(x, interleaved=interleaved, back=back)
    if not interleaved:
        return x.mT.contiguous()
    if back:
        return x.unflatten(1, (2, -1)).permute(0, 3, 2, 1).flatten(2)
    return x.mT.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous()
