"""Rotary position embedding (arXiv 2104.09864) of queries and keys, one pass over them on a GPU.

On CUDA `kernels.core_attention.rope_triton` rotates in fp32 and reads heads in the projection's
layout; elsewhere it is Megatron-Core's composition, number for number, which rounds sines and
cosines to the dtype of x first. The gradient is the rotation by the negative angle.

A rotated channel pairs with the one half the rotated width further on. DeepSeek's latent attention
has pairs of adjacent channels in its projections and half a width apart from then on
(`interleaved`). Transformer Engine's fused rotary embedding applies no factor of YaRN, and cannot
rearrange such pairs or skip leading channels. Megatron-Core's kernel for the queries of latent
attention rotates in place, as `rope_` does, but takes cosines and sines in bf16, and only for YaRN
(docs/measured/kernels/libraries.md).

Legend: S positions, B batch, H heads, d channels, F rotated channels.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.custom_op import custom_op
from phalanx.kernels.derivatives import first_order


def rope(
    x_SBHd: Tensor,
    freqs_S11F: Tensor,
    *,
    mscale: float = 1.0,
    interleaved: bool = False,
    first: int = 0,
) -> Tensor:
    """Rotate channels [first, first + F) of every head; the others are copied.

    Args:
        x_SBHd: any strides with contiguous channels, bf16 or fp32.
        freqs_S11F: fp32 angles in radians; both halves of F are the same.
        mscale: factor on the rotated channels (YaRN, arXiv 2309.00071).
        interleaved: pairs of x are channels 2i and 2i + 1; those of the result are i and i + F / 2.

    Returns:
        [S, B, H, d] in the dtype of x; contiguous on CUDA.

    Raises:
        ValueError: angles that do not fit x.
    """
    check_angles(x_SBHd.shape[0], x_SBHd.shape[-1] - first, freqs_S11F)
    if x_SBHd.is_cuda:
        return _rotate(x_SBHd, freqs_S11F, mscale, interleaved, first, False)
    F = freqs_S11F.shape[-1]
    before, x, after = x_SBHd.split([first, F, x_SBHd.shape[-1] - first - F], -1)
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    cos, sin = ((f * mscale).to(x.dtype) for f in (freqs_S11F.cos(), freqs_S11F.sin()))
    u, v = x.chunk(2, -1)
    return torch.cat((before, x * cos + torch.cat((-v, u), -1) * sin, after), -1)


def rope_(
    x_SBM: Tensor,
    freqs_S11F: Tensor,
    *,
    heads: int,
    mscale: float = 1.0,
    interleaved: bool = False,
    first: int = 0,
) -> Tensor:
    """`rope` that on CUDA rotates x in place, and the gradient of the result in place.

    Only the rotated channels are read and written. Nothing else may read the old x, or the gradient
    that the backward pass receives: both hold for queries between projection and core attention.

    Args:
        x_SBM: heads concatenated, M = H * d. If it needs a gradient it must not be a leaf, and
            should not be a view, whose gradient autograd would copy.

    Returns:
        [S, B, H, d]; on CUDA in the memory of x.

    Raises:
        ValueError: angles that do not fit x.
    """
    S, B, M = x_SBM.shape
    shape = S, B, heads, M // heads
    if not x_SBM.is_cuda:
        x_SBHd = x_SBM.view(shape)
        return rope(x_SBHd, freqs_S11F, mscale=mscale, interleaved=interleaved, first=first)
    check_angles(S, shape[-1] - first, freqs_S11F)
    return RotateInPlace.apply(x_SBM, freqs_S11F, heads, mscale, interleaved, first).view(shape)


def check_angles(positions: int, channels: int, freqs: Tensor) -> None:
    """Raise ValueError for rotary angles that do not fit heads of so many channels."""
    F = freqs.shape[-1]
    if freqs.shape != (positions, 1, 1, F) or freqs.dtype != torch.float32 or F % 2 or channels < F:
        raise ValueError(
            f"rotary angles are {freqs.dtype} {list(freqs.shape)}: "
            f"need fp32 [{positions}, 1, 1, F] with F even and at most {channels}"
        )


class RotateInPlace(torch.autograd.Function):
    """`rope_` by the kernel; a torch custom operator cannot be differentiable and in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, freqs: Tensor, *options: Any) -> Tensor:
        ctx.save_for_backward(freqs)
        ctx.options = options
        _rotate_in_place(x, freqs, *options, inverse=False)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (freqs,) = ctx.saved_tensors
        dy = dense(dy)
        if 0 in dy.stride():  # expanded: several elements share memory
            dy = dy.contiguous()
        _rotate_in_place(dy, freqs, *ctx.options, inverse=True)
        return dy, *(None,) * (1 + len(ctx.options))


def _rotate_in_place(
    x_SBM: Tensor,
    freqs: Tensor,
    heads: int,
    mscale: float,
    interleaved: bool,
    first: int,
    *,
    inverse: bool,
) -> None:
    from phalanx.kernels.core_attention.rope_triton import rotate

    x_SB1Hd = x_SBM.unflatten(-1, (1, heads, -1))
    rotate(
        x_SB1Hd,
        x_SB1Hd,
        freqs[:, 0, 0],
        mscale=mscale,
        first=first,
        pairs_in=interleaved and not inverse,
        pairs_out=interleaved and inverse,
        inverse=inverse,
    )


@custom_op("rope")
def rotate_op(
    x: Tensor, freqs: Tensor, mscale: float, interleaved: bool, first: int, inverse: bool
) -> Tensor:
    """`rope`, or with `inverse` its transpose: from pairs half a width apart to those of x."""
    from phalanx.kernels.core_attention.rope_triton import rotate

    x = dense(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotate(
        x[:, :, :, None],
        y[:, :, :, None],
        freqs[:, 0, 0],
        mscale=mscale,
        first=first,
        pairs_in=interleaved and not inverse,
        pairs_out=interleaved and inverse,
        inverse=inverse,
    )
    return y


@rotate_op.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, freqs, *ctx.options, inverse = inputs
    ctx.back = not inverse
    ctx.save_for_backward(freqs)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (freqs,) = ctx.saved_tensors
    return _rotate(dy, freqs, *ctx.options, ctx.back), None, None, None, None, None


_rotate = first_order(rotate_op, "rope", _backward, _save)


def dense(x: Tensor) -> Tensor:
    """x with contiguous channels, copied only if necessary."""
    return x if x.stride(-1) == 1 else x.contiguous()
