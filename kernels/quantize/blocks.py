"""FP8 in blocks: the definition in plain torch, on any device.

A block is a set of elements with one scale. With amax the largest magnitude of a block, elements
are multiplied by the largest power of two s for which amax * s is at most the largest number of the
format, rounded to nearest even and stored with 1 / s. These are the bytes and scales of Transformer
Engine 2.20's Float8BlockScaling for finite values (common/recipe/recipe_common.cuh), whose default
are powers of two. A block with an infinity keeps NaN as its scale, so that the infinity reaches the
checks of the loss as it would in bf16; Transformer Engine's kernels make 448 of it. A NaN stays one
in its element and has no part in amax.

As s is a power of two, data * scale is exact in bf16 too: a GEMM of the FP8 operands and a GEMM in
bf16 of what `dequantize` returns have the same products.

Legend: R rows, C channels, L experts, O and I channels out and in, S expert rows, T rows of S with
every expert's padded to a multiple of BLOCK; B_X is X in blocks of BLOCK, the last of which may be
short. `parts` are equal ranges of channels, such as the gate and up channels of W1: no block
crosses their border.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # elements of a side of a block

_TOP = {torch.float8_e4m3fn: (448.0, 9), torch.float8_e5m2: (57344.0, 16)}  # 0.875 * 2^exponent


class Quantized(NamedTuple):
    """A matrix in FP8; its values are data * scale."""

    data: Tensor  # e4m3 or e5m2: [R, C], or [L, O, I] of weights
    scale: Tensor
    """fp32, 2^-127 to 2^127 or NaN: [R, parts * B_C/parts], or [L, parts * B_O/parts, B_I]."""


class QuantizedColumns(NamedTuple):
    """A matrix of expert rows, transposed for a GEMM that contracts over an expert's tokens."""

    data_CT: Tensor  # e4m3 or e5m2; expert e from column offsets_T[e]; 0 between
    scale: Tensor  # fp32 [B_T, parts * B_C/parts]


class QuantizedWeights(NamedTuple):
    """Weights in FP8 in both layouts, as FP8 GEMMs contract over the last dimension only."""

    data_LOI: Tensor
    data_LIO: Tensor  # the same elements
    scale: Tensor  # fp32 [L, parts * B_O/parts, B_I], of both

    @property
    def forward(self) -> Quantized:
        return Quantized(self.data_LOI, self.scale)

    @property
    def transposed(self) -> Quantized:
        """W^T of each expert, which products for data gradients read."""
        return Quantized(self.data_LIO, self.scale.mT)


def block_count(channels: int, parts: int = 1) -> int:
    """Number of blocks of `channels` in `parts` equal parts."""
    return parts * -(-(channels // parts) // BLOCK)


def scales(amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of quantization and of dequantization for blocks with these amax."""
    mantissa, exponent = torch.frexp(amax.float())
    power = _TOP[dtype][1] - exponent - (mantissa > 0.875).int()
    power = torch.where((amax > 0) & amax.isfinite(), power, 0).clamp(max=127)
    # From exponent bits, as no device promises its powf to be exact; 2^-127 is denormal.
    up = (power + 127) << 23
    down = torch.where(power < 127, (127 - power) << 23, 1 << 22).to(torch.int32)
    return up.view(torch.float32), torch.where(amax.isinf(), torch.nan, down.view(torch.float32))


def quantize_rows(
    x_RC: Tensor, parts: int = 1, dtype: torch.dtype = torch.float8_e4m3fn
) -> Quantized:
    """A scale for 128 channels of a row. x is fp32 or bf16."""
    data, scale = _quantize(split_parts(x_RC, parts), (1, BLOCK), dtype)
    return Quantized(join_parts(data), join_parts(scale))


def quantize_weights(w_LOI: Tensor, parts: int = 1) -> QuantizedWeights:
    """A scale for 128 x 128 of fp32 or bf16, in e4m3; the parts are of O."""
    L, O, I = w_LOI.shape  # noqa: E741
    data, scale = _quantize(w_LOI.reshape(L * parts, -1, I), (BLOCK, BLOCK), torch.float8_e4m3fn)
    data_LOI = data.view(L, O, I)
    return QuantizedWeights(
        data_LOI, data_LOI.transpose(1, 2).contiguous(), scale.reshape(L, -1, scale.shape[-1])
    )


def quantize_columns(
    x_SC: Tensor,
    offsets: Tensor,
    parts: int = 1,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> QuantizedColumns:
    """`kernels.quantize.quantize.quantize_columns`, of fp32 or bf16 rows."""
    x_TC = padded(x_SC, offsets)
    data, scale = _quantize(split_parts(x_TC, parts), (BLOCK, BLOCK), dtype)
    return QuantizedColumns(join_parts(data).T.contiguous(), join_parts(scale))


def transpose_rows(
    q: Quantized,
    offsets: Tensor,
    *,
    index_S: Tensor | None = None,
    parts: int = 1,
) -> QuantizedColumns:
    """`kernels.quantize.quantize.transpose_rows`."""
    x_SC = dequantize_rows(q, parts)
    if index_S is not None:
        used = torch.arange(len(index_S), device=index_S.device) < offsets[-1]
        x_SC = F.pad(x_SC, (0, 0, 0, 1))  # a row of zeros for the padding
        x_SC = x_SC.index_select(0, index_S.where(used, len(x_SC) - 1))
    return quantize_columns(x_SC, offsets, parts, q.data.dtype)


def dequantize_rows(q: Quantized, parts: int = 1) -> Tensor:
    """fp32 [R, C]."""
    return join_parts(
        _dequantize(split_parts(q.data, parts), split_parts(q.scale, parts), (1, BLOCK))
    )


def dequantize_weights(q: Quantized, parts: int = 1) -> Tensor:
    """fp32 [L, O, I]."""
    L, O, I = q.data.shape  # noqa: E741
    scale = q.scale.reshape(L * parts, -1, q.scale.shape[-1])
    return _dequantize(q.data.reshape(L * parts, -1, I), scale, (BLOCK, BLOCK)).view(L, O, I)


def dequantize_columns(q: QuantizedColumns, offsets: Tensor, rows: int, parts: int = 1) -> Tensor:
    """fp32 [S, C] with S = `rows`; 0 from offsets[L] on."""
    x_TC = join_parts(
        _dequantize(split_parts(q.data_CT.T, parts), split_parts(q.scale, parts), (BLOCK, BLOCK))
    )
    return relocate(x_TC, rows, column_offsets(offsets), offsets)


def column_offsets(offsets: Tensor, block: int = BLOCK) -> Tensor:
    """int32 [L + 1]: offset of each expert's tokens in `QuantizedColumns`, in full blocks."""
    counts_L = (offsets.diff() + block - 1) // block * block
    return torch.nn.functional.pad(counts_L.cumsum(0, dtype=torch.int32), (1, 0))


def column_rows(rows: int, experts: int, block: int = BLOCK) -> int:
    """T for S = `rows` expert rows of L = `experts`, sufficient for any routing."""
    return (rows + (block - 1) * experts) // block * block


def padded(x_SC: Tensor, offsets: Tensor, block: int = BLOCK) -> Tensor:
    """[T, C]: expert rows at `column_offsets`, with rows of 0 up to the next expert's."""
    rows = column_rows(len(x_SC), len(offsets) - 1, block)
    return relocate(x_SC, rows, offsets, column_offsets(offsets, block))


def relocate(x: Tensor, rows: int, starts: Tensor, new_starts: Tensor) -> Tensor:
    """Rows of experts moved from `starts` in x to `new_starts` among `rows`; 0 elsewhere."""
    L = len(starts) - 1
    row = torch.arange(rows, dtype=torch.int32, device=x.device)
    expert = torch.searchsorted(new_starts[1:], row, right=True, out_int32=True)
    inside = expert < L
    expert = expert.clamp(max=L - 1)
    source = starts[expert] + row - new_starts[expert]
    # The smaller of an expert's two row counts, padded and not.
    inside &= (source < starts[expert + 1]) & (row < new_starts[expert + 1])
    if not len(x):
        return x.new_zeros(rows, x.shape[1])
    picked = x.index_select(0, source.clamp(0, len(x) - 1))
    return torch.where(inside[:, None], picked, torch.zeros_like(picked))


def split_parts(x: Tensor, parts: int) -> Tensor:
    """[..., C] -> [parts, ..., C / parts]."""
    return x.unflatten(-1, (parts, -1)).movedim(-2, 0)


def join_parts(x: Tensor) -> Tensor:
    """The inverse of `split_parts`."""
    return x.movedim(0, -2).flatten(-2)


def _quantize(x: Tensor, tile: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Data [..., R, C] and the scale of each tile; the last may be short."""
    x = x.float()
    amax = tile_amax(x.abs().nan_to_num(nan=0.0, posinf=torch.inf), tile)
    up, scale = scales(amax, dtype)
    top = _TOP[dtype][0]
    return (x * spread(up, x, tile)).clamp(-top, top).to(dtype), scale


def _dequantize(data: Tensor, scale: Tensor, tile: tuple[int, int]) -> Tensor:
    return data.float() * spread(scale, data, tile)


def tile_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """[..., R, C] of non-negative numbers -> the largest of each tile; the last may be short."""
    x = F.pad(x, (0, -x.shape[-1] % tile[1], 0, -x.shape[-2] % tile[0]))
    return x.unflatten(-1, (-1, tile[1])).unflatten(-3, (-1, tile[0])).amax((-3, -1))


def spread(scale: Tensor, like: Tensor, tile: tuple[int, int]) -> Tensor:
    """The scale of each tile repeated for its elements, in the shape of `like`."""
    repeated = scale.repeat_interleave(tile[0], -2).repeat_interleave(tile[1], -1)
    return repeated[..., : like.shape[-2], : like.shape[-1]]
