"""`kernels.elementwise.block_sum` on an NVIDIA GPU, in Triton: as fast as the blocks are read."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_MOST_ADDENDS = 2


@triton.jit
def block_sum(  # type: ignore[no-untyped-def]
    blocks, first, second, out, n, R: tl.constexpr, ADDENDS: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(blocks + at, mask=inside).to(tl.float32)
    for r in tl.static_range(1, R):
        total += tl.load(blocks + r * n + at, mask=inside).to(tl.float32)
    if ADDENDS > 0:
        total += tl.load(first + at, mask=inside).to(tl.float32)
    if ADDENDS > 1:
        total += tl.load(second + at, mask=inside).to(tl.float32)
    tl.store(out + at, total, mask=inside)


def add_up(blocks: Tensor, addends: Sequence[Tensor] = ()) -> Tensor:
    """`kernels.elementwise.block_sum.block_sum` on a GPU."""
    if len(addends) > _MOST_ADDENDS:
        raise ValueError(f"at most {_MOST_ADDENDS} addends, not {len(addends)}")
    out = blocks.new_empty(blocks.shape[1:])
    n = out.numel()
    if n:
        grid = (triton.cdiv(n, _BLOCK),)
        pointers = [addend.contiguous() for addend in addends]
        pointers += [out] * (_MOST_ADDENDS - len(pointers))
        constants = dict(R=blocks.shape[0], ADDENDS=len(addends), BLOCK=_BLOCK)
        block_sum[grid](blocks, *pointers, out, n, **constants, num_warps=8)
    return out
