"""What the bias of fc2 adds to the gradient of the routing probabilities, for all rows and experts.

A narrow GEMM that gathers nothing, by a kernel of its own since a library's choice of algorithm
depends on the number of experts, and with it the order of sums: bits of a row and an expert must be
the same where an expert is a replica beside others (parallel.expert_replication). Here they depend
on D alone.

Legend: N rows, L experts, D channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _EXPERTS, _CHANNELS = 64, 64, 64
"""Of a tile. All shapes have the same, as tiles decide the order of sums."""


@triton.jit
def every_bias_dot(  # type: ignore[no-untyped-def]
    dy, b2, out, N, L, D, ROWS: tl.constexpr, EXPERTS: tl.constexpr, CHANNELS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    channel = tl.arange(0, CHANNELS)
    rows = dy + row.to(tl.int64)[:, None] * D
    experts = b2 + expert.to(tl.int64)[:, None] * D
    total = tl.zeros([ROWS, EXPERTS], tl.float32)
    for first in range(0, D, CHANNELS):
        d = first + channel
        inside = (d < D)[None, :]
        x = tl.load(rows + d[None, :], mask=(row < N)[:, None] & inside, other=0.0)
        b = tl.load(experts + d[None, :], mask=(expert < L)[:, None] & inside, other=0.0)
        total = tl.dot(x, tl.trans(b), total)
    at = out + row.to(tl.int64)[:, None] * L + expert[None, :]
    tl.store(at, total, mask=(row < N)[:, None] & (expert < L)[None, :])


def every_bias(dy_ND: Tensor, b2_LD: Tensor) -> Tensor:
    """<dy[n], b2[l]> of all rows and all experts.

    Args:
        dy_ND: bf16, contiguous.
        b2_LD: bf16, contiguous.

    Returns:
        fp32 [N, L].

    Raises:
        ValueError: another dtype, not contiguous, or not of as many channels.
    """
    (N, D), L = dy_ND.shape, b2_LD.shape[0]
    for name, matrix in (("dy", dy_ND), ("b2", b2_LD)):
        if matrix.dtype != torch.bfloat16 or not matrix.is_contiguous() or matrix.shape[1] != D:
            raise ValueError(
                f"{name} must be contiguous bf16 with {D} channels, not {matrix.dtype} "
                f"{list(matrix.shape)} of strides {matrix.stride()}"
            )
    out_NL = dy_ND.new_empty((N, L), dtype=torch.float32)
    if out_NL.numel():
        every_bias_dot[(triton.cdiv(N, _ROWS), triton.cdiv(L, _EXPERTS))](
            *(dy_ND, b2_LD, out_NL, N, L, D),
            ROWS=_ROWS,
            EXPERTS=_EXPERTS,
            CHANNELS=_CHANNELS,
            num_warps=4,
            num_stages=4,
        )
    return out_NL
