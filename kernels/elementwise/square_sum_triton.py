"""`kernels.elementwise.square_sum` of large tensors in Triton: as fast as they are read."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_PROGRAMS = 2112
"""Programs per tensor: 16 for each of a Hopper GPU's 132 SMs, and the same on every GPU."""


@triton.jit
def square_sum(values, out, n, each, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    first = tl.program_id(0).to(tl.int64) * each
    sums = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, each, BLOCK):
        at = first + i + tl.arange(0, BLOCK)
        x = tl.load(values + at, mask=at < n, other=0.0).to(tl.float32)
        sums += x * x
    tl.store(out + tl.program_id(0), tl.sum(sums, 0))


def partial_sums(tensors: Sequence[Tensor]) -> Tensor:
    """fp32 [tensors, programs]: sums of squares of equal parts of each, which is contiguous."""
    out = tensors[0].new_empty(len(tensors), _PROGRAMS, dtype=torch.float32)
    for t, row in zip(tensors, out.unbind(), strict=True):
        each = triton.cdiv(triton.cdiv(t.numel(), _PROGRAMS), _BLOCK) * _BLOCK
        square_sum[(_PROGRAMS,)](t, row, t.numel(), each, BLOCK=_BLOCK, num_warps=8)
    return out
