"""Weight gradients of stacked experts from operands in FP8, written to or added in place.

fc1: d is the gradient of the pre-activations and v the input; fc2: d the output gradient and v the
activations. Both are transposed; that step also brings a gathered operand into the experts' order.
"""

import torch
from torch import Tensor

from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.quantize.blocks import BLOCK, QuantizedColumns, block_count
from phalanx.kernels.sm90.experts.wgrad import choose
from phalanx.kernels.sm90.fp8.operands import require_scales, rows_format
from phalanx.kernels.sm90.fp8.wgrad_kernel import Fp8WgradConfig, Fp8WgradKernel
from phalanx.kernels.sm90.jit.arguments import counter_of, require
from phalanx.kernels.sm90.jit.launch import launch, persistent_ctas


def fp8_wgrad(
    d: QuantizedColumns,
    v: QuantizedColumns,
    column_offsets: Tensor,
    *,
    parts: int = 1,
    out_LOI: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    zeros: bool = True,
    order_L: Tensor | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    tile: int | None = None,
) -> Tensor:
    """dw[e] (+)= sum over expert e's tokens t of outer(d[:, t], v[:, t]), in fp32, rounded once.

    Args:
        d: e4m3 or e5m2 [O, T], contiguous, with scales fp32 [T / 128, blocks of O] of any strides,
            or [T / 128, O] of `vector` blocks. Each part of O is a multiple of 64.
        v: e4m3 [I, T] likewise, I a multiple of 64, in one part; scales of `vector` blocks are
            contiguous.
        column_offsets: int32 [L + 1], of `quantize.blocks.column_offsets`: expert e has tokens
            column_offsets[e] to column_offsets[e + 1], multiples of 128; padding among
            them is zero. Nothing is read from column_offsets[L] on.
        parts: of O, 1 or 2, in each of which blocks restart.
        out_LOI, dtype, accumulate, zeros, order_L, counter, options: as in
            `experts.wgrad`.
        tile: columns of a tile (128, 192, 256); default by `experts.wgrad.choose`, and 128 in
            `vector` blocks.

    Returns:
        dw_LOI.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    if d.blocks != v.blocks:
        raise ValueError(f"d is in {d.blocks} blocks and v in {v.blocks} ones: must be the same")
    for name, q in (("d", d), ("v", v)):
        if q.data_CT.ndim != 2:
            raise ValueError(f"{name} must be [C, T], not {list(q.data_CT.shape)}")
    if parts not in (1, 2):
        raise ValueError(f"parts={parts}: must be 1 or 2")
    (O, T), I, L = d.data_CT.shape, v.data_CT.shape[0], len(column_offsets) - 1  # noqa: E741
    if O % (64 * parts) or I % 64 or T % BLOCK or not O or not I or L < 1:
        raise ValueError(
            f"O={O} in {parts} part(s), I={I}, T={T}, L={L}: a part of O and I must be positive "
            f"multiples of 64, T one of {BLOCK}"
        )
    if accumulate and out_LOI is None:
        raise ValueError("accumulate: needs out_LOI to add to")
    device = d.data_CT.device
    out = d.scale.new_empty(L, O, I, dtype=dtype) if out_LOI is None else out_LOI
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out (or dtype) must be torch.bfloat16 or torch.float32, not {out.dtype}")
    config = Fp8WgradConfig(
        columns=tile or (BLOCK if d.blocks == "vector" else choose(I)),
        fp32_out=out.dtype == torch.float32,
        add=accumulate,
        zeros=zeros or accumulate,
        ordered=order_L is not None,
        rows_format=rows_format("d", d.data_CT),
        vector=d.blocks == "vector",
    )
    require(
        device,
        d=(d.data_CT, d.data_CT.dtype, (O, T)),
        v=(v.data_CT, torch.float8_e4m3fn, (I, T)),
        column_offsets=(column_offsets, torch.int32, (L + 1,)),
        out=(out, out.dtype, (L, O, I)),
        order=(order_L, torch.int32, (L,)),
        counter=(counter, torch.int32, (1,)),
    )
    blocks = (O, I) if config.vector else (block_count(O, parts), block_count(I))
    for name, q, count in zip("dv", (d, v), blocks, strict=True):
        require_scales(device, f"{name}'s scale", q.scale, (T // BLOCK, count))
    if config.vector and (not v.scale.is_contiguous() or v.scale.data_ptr() % 8):
        raise ValueError("v's scale must be contiguous and start at a multiple of 8 bytes")
    if T == 0:
        return out if accumulate or not zeros else out.zero_()
    if counter is None:
        counter = counter_of(device)
    ctas = persistent_ctas(device, options)
    launch(
        Fp8WgradKernel,
        config,
        **dict(d=d.data_CT, d_scale=d.scale, v=v.data_CT, v_scale=v.scale, dw=out),
        **dict(offsets=column_offsets, order=order_L, counter=counter),
        **dict(T=T, O=O, I=I, L=L, ctas=ctas, parts=parts, zero=0),
        **{
            f"{name}_{mode}_stride": stride
            for name, q in (("d", d), ("v", v))
            for mode, stride in zip(("block", "channel"), q.scale.stride(), strict=True)
        },
    )
    return out
