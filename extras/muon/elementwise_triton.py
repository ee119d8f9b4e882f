"""`extras.muon.elementwise` on an NVIDIA GPU, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def muon_momentum(  # type: ignore[no-untyped-def]
    grad, buffer, out, n, keep, other, clip_coef, NESTEROV: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * tl.load(clip_coef)
    mean = keep * tl.load(buffer + at, mask=mask, other=0.0).to(tl.float32) + other * g
    tl.store(buffer + at, mean.to(buffer.dtype.element_ty), mask=mask)
    found = keep * mean + other * g if NESTEROV else mean
    tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)


@triton.jit
def muon_move(  # type: ignore[no-untyped-def]
    param, update, remainder, n, kept, rate, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    p = tl.load(param + at, mask=mask, other=0)
    if SPLIT:  # bits of the weight; arithmetic on them as in `kernels.elementwise.adam`
        low = tl.load(remainder + at, mask=mask, other=0).to(tl.int32)
        p = ((p.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    change = tl.load(rate) * tl.load(update + at, mask=mask, other=0.0).to(tl.float32)
    p = p * tl.load(kept) - change
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        low_bits = bits.to(tl.int16)
        tl.store(remainder + at, low_bits, mask=mask)
        tl.store(param + at, ((bits - low_bits.to(tl.int32)) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(param + at, p, mask=mask)


def launch_momentum(
    grad: Tensor, buffer: Tensor, out: Tensor, keep: float, nesterov: bool, clip_coef: Tensor
) -> None:
    """`extras.muon.elementwise.momentum` into `out`; `clip_coef` is fp32 [] on the device."""
    if n := grad.numel():
        muon_momentum[(triton.cdiv(n, _BLOCK),)](
            *(grad, buffer, out, n, keep, 1 - keep, clip_coef),
            NESTEROV=nesterov,
            BLOCK=_BLOCK,
            num_warps=8,
        )


def launch_move(
    param: Tensor, update: Tensor, kept: Tensor, rate: Tensor, remainder: Tensor | None
) -> None:
    """`extras.muon.elementwise.move_`; `kept` and `rate` are fp32 [] on the device."""
    if n := param.numel():
        split = remainder is not None
        muon_move[(triton.cdiv(n, _BLOCK),)](
            *(param.view(torch.int16) if split else param, update, remainder, n, kept, rate),
            SPLIT=split,
            BLOCK=_BLOCK,
            num_warps=8,
        )
