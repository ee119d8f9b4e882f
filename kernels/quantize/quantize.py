"""Numbers to FP8 in blocks, as `kernels.quantize.blocks` defines it, on a CPU or a GPU.

Triton kernels on CUDA with the bits of the definition, in one read and one write of each tensor;
the definition itself elsewhere. Nothing is read on the host, nothing depends on timing, and all can
be captured in a CUDA graph. Not differentiable. Packed rows are FP8 and scales as one matrix of
bytes, to be sent or gathered as such.

Legend as in `kernels.quantize.blocks`; N rows of a table. All functions raise ValueError for a
dtype, shape or stride that they do not support.
"""

import torch
from torch import Tensor

from phalanx.kernels.quantize import blocks as definition
from phalanx.kernels.quantize.blocks import (
    BLOCK,
    Quantized,
    QuantizedColumns,
    QuantizedWeights,
    block_count,
    column_rows,
)

E4M3 = torch.float8_e4m3fn
_UNQUANTIZED = (torch.bfloat16, torch.float32)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@torch.no_grad()
def quantize_rows(
    x_RC: Tensor, parts: int = 1, dtype: torch.dtype = E4M3, *, out: Quantized | None = None
) -> Quantized:
    """A scale for 128 channels of a row.

    Args:
        x_RC: bf16 or fp32, with contiguous channels.
        parts: equal ranges of channels whose borders no block crosses.
        dtype: float8_e4m3fn or float8_e5m2.
        out: written and returned: data of that dtype, with contiguous channels, and scales.
    """
    _check("x", x_RC, _UNQUANTIZED, parts)
    if out is not None:
        check_rows(out, parts)
        if out.data.shape != x_RC.shape or out.data.dtype != dtype:
            raise ValueError(f"out must be {dtype} {list(x_RC.shape)}, not {_described(out.data)}")
    if not x_RC.is_cuda:
        quantized = definition.quantize_rows(x_RC, parts, dtype)
        if out is None:
            return quantized
        for target, values in zip(out, quantized, strict=True):
            target.copy_(values)
        return out
    from phalanx.kernels.quantize import blocks_triton

    R, C = x_RC.shape
    to = empty_rows(R, C, parts, dtype=dtype, device=x_RC.device) if out is None else out
    blocks_triton.write_rows(x_RC, to, parts)
    return to


@torch.no_grad()
def quantize_weights(w_LOI: Tensor, parts: int = 1) -> QuantizedWeights:
    """A scale for 128 x 128 of contiguous bf16 or fp32, in e4m3, in both layouts."""
    _check_weights(w_LOI, parts)
    if not w_LOI.is_cuda:
        return definition.quantize_weights(w_LOI, parts)
    from phalanx.kernels.quantize import blocks_triton

    L, O, I = w_LOI.shape  # noqa: E741
    out = empty_weights(L, O, I, parts, device=w_LOI.device)
    blocks_triton.write_weights(w_LOI, *out, parts)
    return out


@torch.no_grad()
def quantize_layout(w_LOI: Tensor, parts: int = 1, *, transposed: bool) -> Quantized:
    """One layout of `quantize_weights`: `forward`, or `transposed`."""
    _check_weights(w_LOI, parts)
    if not w_LOI.is_cuda:
        both = definition.quantize_weights(w_LOI, parts)
        return both.transposed if transposed else both.forward
    from phalanx.kernels.quantize import blocks_triton

    L, O, I = w_LOI.shape  # noqa: E741
    shape = (L, I, O) if transposed else (L, O, I)
    data = torch.empty(shape, dtype=E4M3, device=w_LOI.device)
    scale = _empty_scale(L, O, I, parts, device=w_LOI.device)
    data_LOI, data_LIO = (None, data) if transposed else (data, None)
    blocks_triton.write_weights(w_LOI, data_LOI, data_LIO, scale, parts)
    return Quantized(data, scale.mT if transposed else scale)


def _check_weights(w_LOI: Tensor, parts: int) -> None:
    if w_LOI.ndim != 3 or not w_LOI.is_contiguous() or w_LOI.dtype not in _UNQUANTIZED:
        raise ValueError(
            f"weights must be contiguous [L, O, I] in bf16 or fp32, not {_described(w_LOI)}"
        )
    if w_LOI.shape[1] % parts:
        raise ValueError(f"{w_LOI.shape[1]} channels out are not {parts} equal parts")


@torch.no_grad()
def quantize_columns(
    x_SC: Tensor,
    offsets: Tensor,
    parts: int = 1,
    dtype: torch.dtype = E4M3,
) -> QuantizedColumns:
    """A scale for 128 tokens of an expert by 128 channels, transposed.

    `x_SC`: bf16 or fp32 expert rows with contiguous channels; `offsets`: int32 [L + 1], first row
    of each expert; rows from offsets[L] on are not read.
    """
    _check("x", x_SC, _UNQUANTIZED, parts)
    if not x_SC.is_cuda:
        return definition.quantize_columns(x_SC, offsets, parts, dtype)
    from phalanx.kernels.quantize import blocks_triton

    (S, C), L = x_SC.shape, len(offsets) - 1
    out = empty_columns(S, C, L, parts, dtype=dtype, device=x_SC.device)
    blocks_triton.write_columns(x_SC, None, None, offsets, out, parts)
    return out


@torch.no_grad()
def transpose_rows(
    q: Quantized,
    offsets: Tensor,
    *,
    index_S: Tensor | None = None,
    parts: int = 1,
    out: QuantizedColumns | None = None,
) -> QuantizedColumns:
    """`quantize_columns` of the values of FP8 rows, in their format.

    Args:
        q: expert rows, or a table, as by `quantize_rows`; scales of any strides.
        index_S: int32, row of the table for each expert row; not read from offsets[L] on.
        out: destination, from `empty_transpose`; None: new memory.
    """
    check_rows(q, parts)
    if out is None:
        out = empty_transpose(q, offsets, index_S=index_S, parts=parts)
    if not q.data.is_cuda:
        columns = definition.transpose_rows(q, offsets, index_S=index_S, parts=parts)
        out.data_CT.copy_(columns.data_CT)
        out.scale.copy_(columns.scale)
        return out
    from phalanx.kernels.quantize import blocks_triton

    blocks_triton.write_columns(*q, index_S, offsets, out, parts)
    return out


def empty_transpose(
    q: Quantized,
    offsets: Tensor,
    *,
    index_S: Tensor | None = None,
    parts: int = 1,
) -> QuantizedColumns:
    """Memory for `transpose_rows` with the same arguments."""
    N, C = q.data.shape
    S, L = N if index_S is None else len(index_S), len(offsets) - 1
    return empty_columns(S, C, L, parts, dtype=q.data.dtype, device=q.data.device)


def column_offsets(offsets: Tensor) -> Tensor:
    """int32 [L + 1], L >= 1: `blocks.column_offsets` in one launch on a GPU."""
    if not offsets.is_cuda:
        return definition.column_offsets(offsets)
    from phalanx.kernels.quantize import blocks_triton

    out = torch.empty_like(offsets)
    blocks_triton.starts(offsets, out)
    return out


@torch.no_grad()
def dequantize_rows(q: Quantized, parts: int = 1, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """data * scale [R, C] in bf16 or fp32, exact in bf16 except for denormal numbers and overflows.

    `q`: rows with contiguous channels; scales of any strides.
    """
    check_rows(q, parts)
    if dtype not in _UNQUANTIZED:
        raise ValueError(f"rows become bfloat16 or float32, not {dtype}")
    if not q.data.is_cuda:
        return definition.dequantize_rows(q, parts).to(dtype)
    from phalanx.kernels.quantize import blocks_triton

    out = torch.empty(q.data.shape, dtype=dtype, device=q.data.device)
    blocks_triton.dequantize(q, out, parts)
    return out


def empty_rows(
    R: int, C: int, parts: int = 1, *, dtype: torch.dtype = E4M3, device: torch.device
) -> Quantized:
    """Memory for `quantize_rows`."""
    return Quantized(
        torch.empty(R, C, dtype=dtype, device=device),
        torch.empty(R, block_count(C, parts), dtype=torch.float32, device=device),
    )


def empty_weights(
    L: int,
    O: int,  # noqa: E741
    I: int,  # noqa: E741
    parts: int = 1,
    *,
    device: torch.device,
) -> QuantizedWeights:
    """Memory for `quantize_weights`."""
    return QuantizedWeights(
        torch.empty(L, O, I, dtype=E4M3, device=device),
        torch.empty(L, I, O, dtype=E4M3, device=device),
        _empty_scale(L, O, I, parts, device=device),
    )


def _empty_scale(
    L: int,
    O: int,  # noqa: E741
    I: int,  # noqa: E741
    parts: int,
    *,
    device: torch.device,
) -> Tensor:
    shape = L, block_count(O, parts), block_count(I)
    return torch.empty(shape, dtype=torch.float32, device=device)


def empty_columns(
    S: int,
    C: int,
    L: int,
    parts: int = 1,
    *,
    dtype: torch.dtype = E4M3,
    device: torch.device,
) -> QuantizedColumns:
    """Memory for `quantize_columns` and `transpose_rows`, sufficient for any routing."""
    T = column_rows(S, L)
    return QuantizedColumns(
        torch.empty(C, T, dtype=dtype, device=device),
        torch.empty(T // BLOCK, block_count(C, parts), dtype=torch.float32, device=device),
    )


def _check(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...], parts: int) -> None:
    if x.ndim != 2 or x.dtype not in dtypes or (x.shape[1] > 1 and x.stride(1) != 1):
        known = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be [rows, channels] of {known} with contiguous channels, "
            f"not {_described(x)}"
        )
    if x.shape[1] % parts:
        raise ValueError(f"{x.shape[1]} channels are not {parts} equal parts")


def check_rows(q: Quantized, parts: int = 1) -> None:
    """Raise ValueError for rows that kernels cannot read: another dtype, shape or stride."""
    _check("rows", q.data, _FP8, parts)
    want = [len(q.data), block_count(q.data.shape[1], parts)]
    if list(q.scale.shape) != want or q.scale.dtype != torch.float32:
        raise ValueError(f"scales must be fp32 {want}, not {_described(q.scale)}")


def _described(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} of strides {list(x.stride())}"


_ALIGN = 16  # alignment of rows in bytes, for the widest copies on a GPU


def row_bytes(channels: int) -> int:
    """Bytes of a packed row."""
    return _aligned(channels) + _aligned(4 * block_count(channels))


def quantize_packed(x_RC: Tensor, dtype: torch.dtype) -> Tensor:
    """`quantize_rows` of x as uint8 [R, row_bytes(C)]; bytes of padding are undefined."""
    R, C = x_RC.shape
    packed = x_RC.new_empty(R, row_bytes(C), dtype=torch.uint8)
    quantize_rows(x_RC, dtype=dtype, out=unpack_rows(packed, C, dtype))
    return packed


def unpack_rows(packed: Tensor, channels: int, dtype: torch.dtype) -> Quantized:
    """Views of packed rows, whose data are of `dtype`."""
    begin, size = _aligned(channels), 4 * block_count(channels)
    scale = packed[:, begin : begin + size].view(torch.float32)
    return Quantized(packed[:, :channels].view(dtype), scale)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
