"""Weight gradients of stacked experts: sums of outer products over each expert's rows.

fc1: d is the gradient of the pre-activations and v the input; fc2: d the output gradient and v the
activations. One launch of `kernel`, straight into the accumulated gradient, on the current stream
and without reading anything on the host. In bf16 operands are matrices of rows, one of them perhaps
gathered by an index; in FP8 both are transposed (`QuantizedColumns`), their experts' tokens in
whole blocks, which also brings a gathered one into the experts' order.

With few rows for each expert a weight gradient is bound by memory: its fp32 sums are read and
written once for every micro-batch. `wgrad_pair` multiplies the rows of two micro-batches, whose
operands lie in tensors of their own, before a sum is read and written, once for the two.

Legend: S expert rows, T tokens with padding, N rows of a tensor that is gathered from, O and I
channels of d and of v, L experts.
"""

from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.calls import ExpertRows, Operand
from phalanx.kernels.launch_options import DEFAULT, LaunchOptions
from phalanx.kernels.quantize.blocks import BLOCK, QuantizedColumns, block_count
from phalanx.kernels.sm90.gemm.operands import E4M3, FORMATS, require_scales
from phalanx.kernels.sm90.jit.launch import check, launch_persistent, require
from phalanx.kernels.sm90.wgrad.bf16 import Contraction, D, V
from phalanx.kernels.sm90.wgrad.fp8 import Fp8Contraction
from phalanx.kernels.sm90.wgrad.kernel import (
    Factor,
    WgradConfig,
    WgradKernel,
    WgradMath,
    WgradPairKernel,
    choose,
)


def wgrad(
    d: Operand,
    v: Operand,
    offsets: Tensor,
    *,
    index_S: Tensor | None = None,
    out_LOI: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    accumulate: bool = False,
    zeros: bool = True,
    order_L: Tensor | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    tile: int | None = None,
) -> Tensor:
    """dw[e] (+)= sum over expert e's rows s of outer(d[s], v[s]), in fp32, rounded once.

    Args:
        d: bf16 [S, O], contiguous, O a multiple of 64; with `gather` [N, O], and d[s] is row
            index_S[s]. Or e4m3 or e5m2 [O, T], contiguous, with scales fp32 [T / 128, blocks of O]
            of any strides; each of its parts is a multiple of 64.
        v: bf16 [S, I] likewise; or e4m3 [I, T] likewise, in one part.
        offsets: int32 [L + 1], not decreasing, at most S: expert e has rows offsets[e] to offsets[e
            + 1]. In FP8 those of `quantize.blocks.column_offsets`, multiples of 128, and padding
            among the tokens is zero. Nothing is read from offsets[L] on.
        index_S: int32, of the operand with `gather`, at most one; not read from offsets[L] on.
        out_LOI: bf16 or fp32, contiguous; default: a new one of `dtype`.
        accumulate: add to out_LOI. In bf16 what is added is rounded before, and the sum after.
            Experts without rows are left alone.
        zeros: without `accumulate` experts without rows get zeros; otherwise they are left alone.
        order_L: int32 [L], the experts in the order in which they should be started, best by
            falling number of rows.
        counter, options: as in `grouped_gemm`.
        tile: columns of a tile (128, 192, 256); default `choose`.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    check_sizes(d, v, offsets, index_S)
    O, I, L = channels_of(d), channels_of(v), len(offsets) - 1  # noqa: E741
    if accumulate and out_LOI is None:
        raise ValueError("accumulate: needs out_LOI to add to")
    if out_LOI is None:
        out_LOI = data_of(d).new_empty(L, O, I, dtype=dtype)
    out_dtype, device = out_LOI.dtype, data_of(d).device
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out (or dtype) must be torch.bfloat16 or torch.float32, not {out_dtype}")
    config = WgradConfig(
        math_of(d, v, tile),
        fp32_out=out_dtype == torch.float32,
        add=accumulate,
        ordered=order_L is not None,
        zeros=zeros or accumulate,
    )
    rows = arguments(device, d, v, offsets, index_S)
    require(
        device,
        out=(out_LOI, out_dtype, (L, O, I)),
        order=(order_L, torch.int32, (L,)),
        counter=(counter, torch.int32, (1,)),
    )
    if not tokens_of(d) or not tokens_of(v):
        return out_LOI if accumulate or not zeros else out_LOI.zero_()
    launch_persistent(
        *(WgradKernel, config, device, options, counter),
        **dict(**rows, dw=out_LOI, order=order_L),
        L=L,
    )
    return out_LOI


def arguments(
    device: torch.device, d: Operand, v: Operand, offsets: Tensor, index_S: Tensor | None
) -> dict[str, Any]:
    """Checked arguments of the kernel for the rows of a segment, or a ValueError."""
    S = tokens_of(v if d.gather else d)
    factors = dict(
        d=factor(device, "d", d, tokens_of(d) if d.gather else S),
        v=factor(device, "v", v, tokens_of(v) if v.gather else S, E4M3),
    )
    require(
        device,
        offsets=(offsets, torch.int32, offsets.shape),
        index=(index_S, torch.int32, (S,)),
    )
    return dict(**factors, index=index_S, offsets=offsets)


def check_sizes(d: Operand, v: Operand, offsets: Tensor, index_S: Tensor | None) -> None:
    """Raise ValueError for sizes that do not go together, which takes no device."""
    both = {"d": d, "v": v}
    if any(data_of(x).ndim != 2 for x in both.values()) or offsets.ndim != 1:
        shapes = [list(t.shape) for t in (data_of(d), data_of(v), offsets)]
        raise ValueError(f"d and v must be matrices and offsets [L + 1], not {shapes}")
    formats = {name: format_of(x) for name, x in both.items()}
    if formats["d"] != formats["v"]:
        said = " and ".join(f"{name} is in {kind}" for name, kind in formats.items())
        raise ValueError(f"{said}: must be the same")
    for name, x in both.items():
        parts = 1 if formats[name] == "bf16" else x.parts
        if not channels_of(x) or channels_of(x) % (64 * parts):
            raise ValueError(
                f"{name} has {channels_of(x)} channels in {parts} part(s), each of which must be a "
                "positive multiple of 64"
            )
    if len(offsets) < 2:
        raise ValueError("offsets must be [L + 1], for at least one expert")
    if d.gather and v.gather:
        raise ValueError("d and v: gather at most one of them")
    if (d.gather or v.gather) != (index_S is not None):
        raise ValueError("index_S: give it if an operand is gathered, and not otherwise")
    if formats["d"] == "fp8":
        _check_columns(d, v)


def _check_columns(d: Operand, v: Operand) -> None:
    if d.gather or v.gather:
        raise ValueError("d and v: operands in FP8 must be in the experts' order, not gathered")
    if v.parts > 1:
        raise ValueError(f"v must be in one part, not {v.parts}")
    if tokens_of(d) % BLOCK:
        raise ValueError(f"d has {tokens_of(d)} tokens: must be a multiple of {BLOCK}")


def math_of(d: Operand, v: Operand, tile: int | None) -> WgradMath:
    """The product for the operands' format, with tiles of so many columns or of the best."""
    columns = tile or choose(channels_of(v))
    if isinstance(d.matrix, QuantizedColumns):
        dtype = d.matrix.data_CT.dtype
        if dtype not in FORMATS or dtype == torch.bfloat16:
            raise ValueError(f"d must be torch.float8_e4m3fn or e5m2, not {dtype}")
        return Fp8Contraction(columns, FORMATS[dtype])
    return Contraction(columns, D if d.gather else V if v.gather else None)


def wgrad_pair(
    first: ExpertRows,
    second: ExpertRows,
    out_LOI: Tensor,
    *,
    accumulate: bool = False,
    zeros: bool = True,
    order_L: Tensor | None = None,
    counter: Tensor | None = None,
    options: LaunchOptions = DEFAULT,
    tile: int | None = None,
) -> Tensor:
    """dw[e] (+)= sum over expert e's rows s, first and second, of outer(d[s], v[s]).

    The sum over all rows is in fp32, the first ones before the second ones, and rounded once: two
    calls of `wgrad` round the sum in `out_LOI` after each. Both are of the same experts, channels
    and format, and gather the same operand; their numbers of rows are independent. `out_LOI` is
    bf16 or fp32, contiguous, and returned. Other arguments are those of `wgrad`; experts without
    rows are those that have none in both.

    Raises:
        ValueError: a shape, dtype, stride or device that the kernel does not take.
    """
    for rows in (first, second):
        check_sizes(*rows)
    (d, v, offsets, _), others = first, second.offsets
    if any(_kind(x) != _kind(y) for x, y in zip(first[:2], second[:2], strict=True)):
        raise ValueError("first and second: operands must have the same channels and format")
    if len(offsets) != len(others):
        raise ValueError("first and second: must have the same experts")
    if out_LOI.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out must be torch.bfloat16 or torch.float32, not {out_LOI.dtype}")
    L, device = len(offsets) - 1, data_of(d).device
    both = [arguments(device, *rows) for rows in (first, second)]
    require(
        device,
        out=(out_LOI, out_LOI.dtype, (L, channels_of(d), channels_of(v))),
        order=(order_L, torch.int32, (L,)),
        counter=(counter, torch.int32, (1,)),
    )
    filled = [rows for rows in (first, second) if tokens_of(rows.d) and tokens_of(rows.v)]
    if len(filled) < 2:
        rows = filled[0] if filled else first
        return wgrad(
            *(rows.d, rows.v, rows.offsets),
            index_S=rows.index_S,
            out_LOI=out_LOI,
            accumulate=accumulate,
            zeros=zeros,
            order_L=order_L,
            counter=counter,
            options=options,
            tile=tile,
        )
    config = WgradConfig(
        math_of(d, v, tile),
        fp32_out=out_LOI.dtype == torch.float32,
        add=accumulate,
        ordered=order_L is not None,
        zeros=zeros or accumulate,
    )
    launch_persistent(
        *(WgradPairKernel, config, device, options, counter),
        **both[0],
        **{f"{name}2": value for name, value in both[1].items()},
        **dict(dw=out_LOI, order=order_L, L=L),
    )
    return out_LOI


def _kind(x: Operand) -> tuple[object, ...]:
    return channels_of(x), data_of(x).dtype, x.parts, x.gather


def factor(
    device: torch.device, name: str, x: Operand, tokens: int, dtype: torch.dtype | None = None
) -> Factor:
    """Check an operand and return it as an argument.

    `tokens` are its rows in bf16, or T. `dtype` is its only one in FP8; None: e4m3 or e5m2. Shape,
    dtype, strides, alignment and device raise a ValueError.
    """
    q, data, channels = x.matrix, data_of(x), channels_of(x)
    if not isinstance(q, QuantizedColumns):
        check(device, name, data, torch.bfloat16, (tokens, channels))
        return Factor(data, None, tokens, channels, 1, 0, 0)
    check(device, name, data, dtype or data.dtype, (channels, tokens))
    blocks = tokens // BLOCK, block_count(channels, x.parts)
    require_scales(device, f"{name}'s scale", q.scale, blocks)
    return Factor(data, q.scale, tokens, channels, x.parts, *q.scale.stride())


def data_of(x: Operand) -> Tensor:
    """The elements of an operand, in FP8 without their scales."""
    data: Tensor = x.matrix.data_CT if isinstance(x.matrix, QuantizedColumns) else x.matrix
    return data


def channels_of(x: Operand) -> int:
    """Channels of an operand in either format."""
    return data_of(x).shape[0 if isinstance(x.matrix, QuantizedColumns) else 1]


def tokens_of(x: Operand) -> int:
    """Rows of an operand, with padding in FP8."""
    return data_of(x).shape[1 if isinstance(x.matrix, QuantizedColumns) else 0]


def format_of(x: Operand) -> str:
    """`fp8` or `bf16`."""
    return "fp8" if isinstance(x.matrix, QuantizedColumns) else "bf16"
