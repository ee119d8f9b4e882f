"""`kernels.elementwise.adam` on an NVIDIA GPU, in Triton: 20 bytes of traffic a parameter."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 4  # small programs: 4.13 TB/s on an H200; blocks of 4,096 with 8 warps reach 3.98


@triton.jit
def adamw_step(  # type: ignore[no-untyped-def]
    param,
    grad,
    mean,
    square,
    remainder,
    n,
    beta1,
    other1,
    beta2,
    other2,
    eps,
    per_step,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A program has BLOCK elements of each tensor, reads each once and writes it in place: no other
    # program touches them. 64 bits, as tensors may have more than 2^31 elements.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    # From the device: a captured graph replays the launch with its arguments, and these change from
    # step to step.
    decay, rate = tl.load(per_step), tl.load(per_step + 1)
    scale, clip_coef = tl.load(per_step + 2), tl.load(per_step + 3)
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * clip_coef
    m = beta1 * tl.load(mean + at, mask=mask, other=0.0).to(tl.float32) + other1 * g
    v = beta2 * tl.load(square + at, mask=mask, other=0.0).to(tl.float32) + other2 * g * g
    tl.store(mean + at, m.to(tl.bfloat16), mask=mask)
    tl.store(square + at, v.to(tl.bfloat16), mask=mask)
    p = tl.load(param + at, mask=mask, other=0)
    if SPLIT:  # bits of the weight; arithmetic on them as in `kernels.elementwise.adam`
        low = tl.load(remainder + at, mask=mask, other=0).to(tl.int32)
        p = ((p.to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    # Of the moments in fp32, before they are rounded. Rounded to nearest: a division that is only
    # close has other bits than the statement in torch.
    change = tl.div_rn(rate * m, tl.sqrt_rn(v) * scale + eps)
    p = p * decay - change
    if SPLIT:
        bits = p.to(tl.int32, bitcast=True)
        # As an int16 the low bits may be negative: the bits without them are then those of the next
        # bf16. So the weight is the master rounded to nearest, and both together are the master.
        low_bits = bits.to(tl.int16)
        tl.store(remainder + at, low_bits, mask=mask)
        tl.store(param + at, ((bits - low_bits.to(tl.int32)) >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(param + at, p, mask=mask)


def launch(
    param_n: Tensor,
    grad_n: Tensor,
    mean_n: Tensor,
    square_n: Tensor,
    update: Any,
    remainder_n: Tensor | None = None,
) -> None:
    """`kernels.elementwise.adam.update_` of flat tensors."""
    if not (n := param_n.numel()):
        return
    split = remainder_n is not None
    per_step = update.on_device
    if per_step is None:
        # Copied from the host: not in a captured step, which has them on the device.
        per_step = torch.tensor(update.per_step, device=param_n.device)
    adamw_step[(triton.cdiv(n, _BLOCK),)](
        param_n.view(torch.int16) if split else param_n,
        grad_n,
        mean_n,
        square_n,
        remainder_n,
        n,
        update.beta1,
        1 - update.beta1,
        update.beta2,
        1 - update.beta2,
        update.eps,
        per_step,
        SPLIT=split,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
