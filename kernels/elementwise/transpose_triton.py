"""`kernels.elementwise.transpose` on an NVIDIA GPU, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 64  # rows and channels of a tile: 128 bytes of bf16 in a line on both sides


@triton.jit
def transpose(  # type: ignore[no-untyped-def]
    stored, turned, D, H, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, TILE: tl.constexpr
):
    expert = tl.program_id(2).to(tl.int64) * D * H
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    h = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = h
    if INTERLEAVED:  # gate 0, up 0, gate 1, ...: rows of gates come first
        row = (h % 2) * (H // 2) + h // 2
    of_stored = stored + expert + d[:, None].to(tl.int64) * H + h[None, :]
    of_turned = turned + expert + row[:, None].to(tl.int64) * D + d[None, :]
    inside = (d[:, None] < D) & (h[None, :] < H)
    if BACK:
        x = tl.load(of_turned, mask=tl.trans(inside))
        tl.store(of_stored, tl.trans(x), mask=inside)
    else:
        x = tl.load(of_stored, mask=inside)
        tl.store(of_turned, tl.trans(x), mask=tl.trans(inside))


def launch(x: Tensor, *, interleaved: bool, back: bool) -> Tensor:
    """`kernels.elementwise.transpose.transposed`."""
    experts, rows, columns = x.shape
    out = x.new_empty(experts, columns, rows)
    if not x.numel():
        return out
    stored, turned = (out, x) if back else (x, out)
    D, H = stored.shape[1:]
    grid = (triton.cdiv(H, _TILE), triton.cdiv(D, _TILE), experts)
    with torch.cuda.device(x.device):
        transpose[grid](
            *(stored, turned, D, H), INTERLEAVED=interleaved, BACK=back, TILE=_TILE, num_warps=4
        )
    return out
