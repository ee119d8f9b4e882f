"""Weight gradients of two micro-batches in one pass over the sums.

With few rows for each expert a weight gradient is bound by memory: its fp32 sums are read and
written once for every micro-batch. Here the rows of both micro-batches are multiplied before a sum
is read and written, once for the two. The operands of each lie in tensors of their own.
"""

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.calls import ExpertRows, Operand
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.sm90.experts.wgrad import arguments, check_sizes, math_of, wgrad
from phalanx.kernels.sm90.experts.wgrad_kernel import WgradConfig, WgradPairKernel
from phalanx.kernels.sm90.experts.wgrad_operands import channels_of, data_of, tokens_of
from phalanx.kernels.sm90.jit.arguments import launch_persistent, require


def wgrad_pair(
    first: ExpertRows,
    second: ExpertRows,
    out_LOI: Tensor,
    *,
    accumulate: bool = False,
    zeros: bool = True,
    order_L: Tensor | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    tile: int | None = None,
) -> Tensor:
    """dw[e] (+)= sum over expert e's rows s, first and second, of outer(d[s], v[s]).

    The sum over all rows is in fp32, the first ones before the second ones, and rounded once: two
    calls of `wgrad` round the sum in `out_LOI` after each.

    Args:
        first, second: of the same experts, channels and format, which gather the same operand.
            Their numbers of rows are independent.
        out_LOI: bf16 or fp32, contiguous.
        accumulate: add to out_LOI instead of writing it, see `wgrad`.
        zeros, order_L, counter, options, tile: as for `wgrad`. Experts without rows are those that
            have none in both.

    Returns:
        out_LOI.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    for rows in (first, second):
        check_sizes(*rows)
    (d, v, offsets, _), others = first, second.offsets
    if any(_kind(x) != _kind(y) for x, y in zip(first[:2], second[:2], strict=True)):
        raise ValueError("first and second: operands must have the same channels and format")
    if len(offsets) != len(others):
        raise ValueError("first and second: must have the same experts")
    if out_LOI.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out must be torch.bfloat16 or torch.float32, not {out_LOI.dtype}")
    L, device = len(offsets) - 1, data_of(d).device
    both = [arguments(device, *rows) for rows in (first, second)]
    require(
        device,
        out=(out_LOI, out_LOI.dtype, (L, channels_of(d), channels_of(v))),
        order=(order_L, torch.int32, (L,)),
        counter=(counter, torch.int32, (1,)),
    )
    filled = [rows for rows in (first, second) if tokens_of(rows.d) and tokens_of(rows.v)]
    if len(filled) < 2:
        rows = filled[0] if filled else first
        return wgrad(
            *(rows.d, rows.v, rows.offsets),
            index_S=rows.index_S,
            out_LOI=out_LOI,
            accumulate=accumulate,
            zeros=zeros,
            order_L=order_L,
            counter=counter,
            options=options,
            tile=tile,
        )
    config = WgradConfig(
        math_of(d, v, tile),
        fp32_out=out_LOI.dtype == torch.float32,
        add=accumulate,
        ordered=order_L is not None,
        zeros=zeros or accumulate,
    )
    launch_persistent(
        *(WgradPairKernel, config, device, options, counter),
        **both[0],
        **{f"{name}2": value for name, value in both[1].items()},
        **dict(dw=out_LOI, order=order_L, L=L),
    )
    return out_LOI


def _kind(x: Operand) -> tuple[object, ...]:
    """All facts of an operand but its rows."""
    return channels_of(x), data_of(x).dtype, x.parts, x.gather
