"""Operands of cuDNN's block-scaled grouped GEMMs, for the recipes of Blackwell.

Elements and scales are those of `extras.microscaling.mxfp8` and `extras.microscaling.nvfp4`, the
scales packed by `extras.blackwell.scales`. Every operand is quantized from unquantized values.

Legend: S expert rows, C channels, L experts, T tokens in whole blocks of an expert, O and I
channels out and in.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.extras.blackwell.limits import ROWS
from phalanx.extras.blackwell.scales import pack, pack_columns, unpack
from phalanx.extras.microscaling import mxfp8, nvfp4
from phalanx.kernels.expert_mlp.torch_grouped import as_one_kernel


class Packed(NamedTuple):
    """A matrix, or one for each expert, contracted over its last dimension."""

    data: Tensor  # e4m3, or two e2m1 a byte
    scale: Tensor  # [bytes], e8m0 or e4m3, packed
    amax_L: Tensor | None = None  # fp32 largest magnitude of each expert's tensor; None with MXFP8


class Format(Protocol):
    """A block-scaled number format."""

    block: int  # elements that share a scale
    scales_products: bool  # a product has a factor per expert in addition to the scales of blocks
    quantized_outputs: bool  # epilogues quantize their outputs

    def rows(self, x_SC: Tensor, offsets: Tensor, stochastic: bool) -> Packed:
        """[S, C], contracted over channels."""
        ...

    def columns(self, x_SC: Tensor, offsets: Tensor, stochastic: bool) -> Packed:
        """[C, T], contracted over tokens."""
        ...

    def weights(self, w_LOI: Tensor) -> Packed:
        """[L, O, I]."""
        ...


class MXFP8(Format):
    """e4m3 in blocks of 32."""

    block = mxfp8.BLOCK
    scales_products = False
    quantized_outputs = True

    def rows(self, x_SC: Tensor, offsets: Tensor, stochastic: bool) -> Packed:
        return Packed(*as_one_kernel(_mxfp8_rows, x_SC))

    def columns(self, x_SC: Tensor, offsets: Tensor, stochastic: bool) -> Packed:
        data_CT, scale = as_one_kernel(_mxfp8, x_SC.mT)
        packed = as_one_kernel(pack_columns, scale, offsets, self.block)
        return Packed(data_CT, packed.view(torch.float8_e8m0fnu))

    def weights(self, w_LOI: Tensor) -> Packed:
        return Packed(*as_one_kernel(_mxfp8_rows, w_LOI))

    def values(self, rows: Packed) -> Tensor:
        """fp32 [S, C] of rows."""
        S, C = rows.data.shape
        codes = unpack(rows.scale.view(-1).view(torch.uint8), S, -(-C // self.block))
        return mxfp8.dequantize(mxfp8.MXFP8(rows.data, codes))


class NVFP4(Format):
    """e2m1 in blocks of 16, or of 16 x 16 of weights; columns are rotated."""

    block = nvfp4.BLOCK
    scales_products = True
    quantized_outputs = False

    def rows(self, x_SC: Tensor, offsets: Tensor, stochastic: bool) -> Packed:
        q = nvfp4.quantize_rows(x_SC, offsets, stochastic=stochastic)
        return Packed(_pairs(q.code), _bytes(pack(q.scale.view(torch.uint8))), q.amax)

    def columns(self, x_SC: Tensor, offsets: Tensor, stochastic: bool) -> Packed:
        q = nvfp4.quantize_columns(x_SC, offsets, ROWS, stochastic=stochastic)
        scale = pack_columns(q.scale.view(torch.uint8), offsets, self.block)
        return Packed(_pairs(q.code), _bytes(scale), q.amax)

    def weights(self, w_LOI: Tensor) -> Packed:
        q = nvfp4.quantize_weights(w_LOI)
        rows = q.scale.view(torch.uint8).repeat_interleave(self.block, 1)[:, : w_LOI.shape[1]]
        return Packed(_pairs(q.code), _bytes(pack(rows)), q.amax)


FORMATS: dict[str, MXFP8 | NVFP4] = {"mxfp8": MXFP8(), "nvfp4": NVFP4()}


def _mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    q = mxfp8.quantize(x)
    return q.data.contiguous(), q.scale


def _mxfp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    q = mxfp8.quantize(x)
    return q.data.contiguous(), pack(q.scale).view(torch.float8_e8m0fnu)


def _pairs(code: Tensor) -> Tensor:
    return nvfp4.packed(code).contiguous().view(torch.float4_e2m1fn_x2)


def _bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e4m3fn)
