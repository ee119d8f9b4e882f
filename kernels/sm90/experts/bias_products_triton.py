"""Products of rows and the biases of fc2: their share of the gradient of the routing probabilities.

A library chooses its algorithm, and with it the order of sums, by the number of experts; the bits
of a row and an expert must be the same where an expert is a replica (expert replication). Here they
depend on D alone. FP8 rows become bf16 as they are read.

Legend: N rows, L experts, D channels, B blocks of channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from phalanx.kernels.quantize.blocks import BLOCK, Quantized
from phalanx.kernels.quantize.quantize import check_rows

_ROWS, _EXPERTS, _CHANNELS = 64, 64, 64
"""Sizes of a tile: the same for all shapes, as they determine the order of sums."""


@triton.jit
def bias_products_kernel(  # type: ignore[no-untyped-def]
    dy,
    scale,
    b2,
    out,
    N,
    L,
    D,
    dy_row,
    scale_row,
    scale_block,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    channel = tl.arange(0, CHANNELS)
    rows = dy + row.to(tl.int64)[:, None] * dy_row
    experts = b2 + expert.to(tl.int64)[:, None] * D
    total = tl.zeros([ROWS, EXPERTS], tl.float32)
    for first in range(0, D, CHANNELS):
        d = first + channel
        inside = (d < D)[None, :]
        x = tl.load(rows + d[None, :], mask=(row < N)[:, None] & inside, other=0.0)
        if scale is not None:  # a block has whole tiles of channels
            at = scale + row.to(tl.int64) * scale_row + first // BLOCK * scale_block
            x = x.to(tl.float32) * tl.load(at, mask=row < N, other=0.0)[:, None]
            x = x.to(tl.bfloat16)  # exact but for denormal numbers: scales are powers of two
        b = tl.load(experts + d[None, :], mask=(expert < L)[:, None] & inside, other=0.0)
        total = tl.dot(x, tl.trans(b), total)
    at = out + row.to(tl.int64)[:, None] * L + expert[None, :]
    tl.store(at, total, mask=(row < N)[:, None] & (expert < L)[None, :])


def bias_products(dy: Tensor | Quantized, b2_LD: Tensor) -> Tensor:
    """<dy[n], b2[l]> of all rows and all experts, fp32 [N, L].

    Args:
        dy: bf16 [N, D], contiguous; or FP8, where rows are contiguous, with fp32 scales [N, B] of
            any strides.
        b2_LD: bf16, contiguous.

    Raises:
        ValueError: another dtype, not contiguous, or not of as many channels.
    """
    if isinstance(dy, Quantized):
        check_rows(dy)
        (data, scale), strides = dy, dy.scale.stride()
    else:
        _check("dy", dy, dy.shape[1])
        data, scale, strides = dy, None, (0, 0)
    (N, D), L = data.shape, b2_LD.shape[0]
    _check("b2", b2_LD, D)
    out_NL = torch.empty((N, L), dtype=torch.float32, device=data.device)
    if out_NL.numel():
        bias_products_kernel[(triton.cdiv(N, _ROWS), triton.cdiv(L, _EXPERTS))](
            *(data, scale, b2_LD, out_NL, N, L, D),
            data.stride(0),
            *strides,
            ROWS=_ROWS,
            EXPERTS=_EXPERTS,
            CHANNELS=_CHANNELS,
            BLOCK=BLOCK,
            num_warps=4,
            num_stages=4,
        )
    return out_NL


def _check(name: str, matrix: Tensor, channels: int) -> None:
    if matrix.dtype != torch.bfloat16 or not matrix.is_contiguous() or matrix.shape[1] != channels:
        raise ValueError(
            f"{name} must be contiguous bf16 with {channels} channels, not {matrix.dtype} "
            f"{list(matrix.shape)} of strides {matrix.stride()}"
        )
