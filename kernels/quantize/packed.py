"""Rows in FP8 and their scales as one matrix of bytes, to be sent or gathered as such.

Legend: R rows, C channels, B blocks of a row.
"""

import torch
from torch import Tensor

from phalanx.kernels.quantize.blocks import Quantized, block_count
from phalanx.kernels.quantize.quantize import quantize_rows

_ALIGN = 16  # alignment of rows in bytes, for the widest copies on a GPU


def row_bytes(channels: int) -> int:
    """Bytes of a packed row."""
    return _aligned(channels) + _aligned(4 * block_count(channels))


def quantize_packed(x_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """`quantize_rows` of x as uint8 [R, row_bytes(C)]; bytes of padding are undefined."""
    R, C = x_RC.shape
    packed = x_RC.new_empty(R, row_bytes(C), dtype=torch.uint8)
    quantize_rows(x_RC, dtype=dtype, out=unpack_rows(packed, C, dtype))
    return packed


def unpack_rows(packed: Tensor, channels: int, dtype: torch.dtype) -> Quantized:
    """Views of packed rows, whose data are of `dtype`."""
    begin, size = _aligned(channels), 4 * block_count(channels)
    scale = packed[:, begin : begin + size].view(torch.float32)
    return Quantized(packed[:, :channels].view(dtype), scale)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
