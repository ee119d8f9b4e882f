"""Operands of a weight gradient: checked where they enter, and an argument of the kernel each.

In bf16 an operand is a matrix of rows, perhaps gathered by an index; in FP8 it is transposed,
`QuantizedColumns`, with its experts' tokens in whole blocks.

Legend: S expert rows, T tokens with padding, C channels.
"""

from typing import NamedTuple

import torch
from cutlass import Int32
from torch import Tensor

from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.quantize.blocks import BLOCK, QuantizedColumns, block_count
from phalanx.kernels.sm90.gemm.operands import require_scales
from phalanx.kernels.sm90.jit.launch import check
from phalanx.kernels.sm90.jit.pointers import BytesPtr, Fp32Ptr


class Factor(NamedTuple):
    """An operand as an argument: tensors and ints at a launch, pointers and Int32 in a kernel."""

    data: BytesPtr  # bf16 [tokens, channels], or FP8 [channels, tokens]; contiguous
    scale: Fp32Ptr  # fp32 [token blocks, channel blocks]; null in bf16
    tokens: Int32
    channels: Int32
    parts: Int32  # parts of the channels, in each of which blocks restart; 1 in bf16
    scale_token: Int32  # stride of the scales from a block of tokens to the next one
    scale_channel: Int32  # stride of the scales from a block of channels to the next one


def factor(
    device: torch.device, name: str, x: Operand, tokens: int, dtype: torch.dtype | None = None
) -> Factor:
    """Check an operand and return it as an argument.

    `tokens` are its rows in bf16, or T. `dtype` is its only one in FP8; None: e4m3 or e5m2. Shape,
    dtype, strides, alignment and device raise a ValueError.
    """
    q, data, channels = x.matrix, data_of(x), channels_of(x)
    if not isinstance(q, QuantizedColumns):
        check(device, name, data, torch.bfloat16, (tokens, channels))
        return Factor(data, None, tokens, channels, 1, 0, 0)
    check(device, name, data, dtype or data.dtype, (channels, tokens))
    blocks = tokens // BLOCK, block_count(channels, x.parts)
    require_scales(device, f"{name}'s scale", q.scale, blocks)
    return Factor(data, q.scale, tokens, channels, x.parts, *q.scale.stride())


def data_of(x: Operand) -> Tensor:
    """The elements of an operand, in FP8 without their scales."""
    data: Tensor = x.matrix.data_CT if isinstance(x.matrix, QuantizedColumns) else x.matrix
    return data


def channels_of(x: Operand) -> int:
    """Channels of an operand in either format."""
    return data_of(x).shape[0 if isinstance(x.matrix, QuantizedColumns) else 1]


def tokens_of(x: Operand) -> int:
    """Rows of an operand, with padding in FP8."""
    return data_of(x).shape[1 if isinstance(x.matrix, QuantizedColumns) else 0]


def format_of(x: Operand) -> str:
    """`fp8` or `bf16`."""
    return "fp8" if isinstance(x.matrix, QuantizedColumns) else "bf16"
