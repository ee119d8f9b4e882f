"""The gradient of attention sinks on an NVIDIA GPU, in Triton; see `kernels.core_attention.sinks`.

Legend: S positions, B batch, H heads, d channels, n blocks of positions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit
def attention_sink_gradient(  # type: ignore[no-untyped-def]
    out, dout, lse, sinks, part, S, B, H, d, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    row = tl.program_id(1)  # b * H + h
    h = row % H
    b = row // H
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, WIDE)
    here = s < S
    at = ((s.to(tl.int64) * B + b) * H + h)[:, None] * d + c[None, :]
    inside = here[:, None] & (c < d)[None, :]
    o = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.exp(
        tl.load(sinks + h) - tl.load(lse + row.to(tl.int64) * S + s, mask=here, other=0.0)
    )
    total = tl.sum(tl.where(here, share * tl.sum(o * g, 1), 0.0), 0)
    tl.store(part + row * tl.num_programs(0) + tl.program_id(0), -total)


def gradient(out_SBHd: Tensor, dout_SBHd: Tensor, lse_BHS: Tensor, sinks_H: Tensor) -> Tensor:
    """dsink of each head in fp32, summed in an order that depends on shapes alone.

    `lse_BHS`: fp32 log of the sum of exponentials of a row with its sink. All are contiguous.
    """
    S, B, H, d = out_SBHd.shape
    blocks = triton.cdiv(S, _BLOCK)
    part_BHn = torch.empty(B, H, blocks, device=out_SBHd.device)
    wide = triton.next_power_of_2(d)
    attention_sink_gradient[(blocks, B * H)](
        out_SBHd,
        dout_SBHd,
        lse_BHS,
        sinks_H,
        part_BHn,
        *(S, B, H, d),
        BLOCK=_BLOCK,
        WIDE=wide,
    )
    return part_BHn.sum((0, 2))
