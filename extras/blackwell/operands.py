"""Operands of cuDNN's grouped GEMMs: padded rows of experts, and block-scaled formats.

The rows of every expert are padded to 256 with zeros: a plan of `kernels.expert_mlp.expert_plan`
with `align` has index -1 and probability 0 there. Elements and scales are those of
`extras.microscaling.mxfp8` and `extras.microscaling.nvfp4`. Every operand is quantized from
unquantized values.

Scales are packed in the order of the tensor cores. 128 rows by 4 blocks along the contraction are
an atom of 512 bytes: row r, block b of it is at (r % 32) * 16 + (r // 32) * 4 + b (PTX ISA,
tcgen05.mma, scale factor layout). Atoms of the same 128 rows are contiguous along the contraction,
followed by those of the next 128 rows. In a weight gradient, which contracts over tokens, every
expert has its own matrix, one after the other.

Legend: N rows of x, S expert rows, C channels, L experts, T tokens in whole blocks of an expert, O
and I channels out and in, R rows, B blocks along the contraction.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.extras.blackwell.availability import ROWS
from phalanx.extras.microscaling import mxfp8, nvfp4
from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.torch_grouped import as_one_kernel

_ROWS, _BLOCKS = 128, 4


def pack(scale: Tensor) -> Tensor:
    """[..., R, B] of one byte -> [bytes], every matrix padded to full atoms with zeros."""
    return _atoms(scale).flatten()


def unpack(packed: Tensor, rows: int, blocks: int) -> Tensor:
    """The inverse of `pack`, [rows, blocks], of one matrix."""
    columns = -(-blocks // _BLOCKS)
    atoms = packed.view(-1, columns, 32, _ROWS // 32, _BLOCKS)
    padded = atoms.permute(0, 3, 2, 1, 4).reshape(-1, columns * _BLOCKS)
    return padded[:rows, :blocks]


def pack_columns(scale_CB: Tensor, offsets: Tensor, block: int) -> Tensor:
    """[C, B] of one byte, blocks of `block` tokens -> [bytes], expert after expert.

    `offsets`, int32 [L + 1], are the first token of each expert: multiples of 4 blocks.
    """
    atoms = _atoms(scale_CB).flatten(2)  # [C / 128, B / 4, bytes]
    num_rows, num_columns = atoms.shape[:2]
    starts = offsets // (block * _BLOCKS)
    atom_B = torch.arange(num_columns, dtype=torch.int32, device=atoms.device)
    # Atoms after the last expert are never read.
    expert_B = torch.searchsorted(starts[1:], atom_B, right=True)
    starts = F.pad(starts, (0, 1), value=num_columns)
    first_B, count_B = starts[expert_B], (starts[expert_B + 1] - starts[expert_B])
    row = torch.arange(num_rows, dtype=torch.int32, device=atoms.device)[:, None]
    index = num_rows * first_B + row * count_B + atom_B - first_B
    packed = torch.empty_like(atoms).flatten(0, 1)
    packed[index.flatten().long()] = atoms.flatten(0, 1)
    return packed.flatten()


def _atoms(scale: Tensor) -> Tensor:
    """[..., R / 128, B / 4, 32, 4, 4]."""
    missing = -scale.shape[-1] % _BLOCKS, -scale.shape[-2] % _ROWS
    padded = F.pad(scale, (0, missing[0], 0, missing[1]))
    atoms = padded.unflatten(-1, (-1, _BLOCKS)).unflatten(-3, (-1, _ROWS // 32, 32))
    return atoms.movedim(-2, -4).transpose(-3, -2).contiguous()


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


_ALIGN = 16  # alignment in bytes that cuDNN requires of every operand


def gathered(x: Operand, plan: ExpertPlan) -> Tensor:
    """The expert rows of an operand: zeros where a plan's index is -1."""
    if not x.gather or plan.row_index_S is None:
        rows: Tensor = x.matrix
        return rows
    if not len(x.matrix):
        return x.matrix.new_zeros(len(plan.row_index_S), x.matrix.shape[1])
    x_SC: Tensor = as_one_kernel(_gather, x.matrix, plan.row_index_S)
    return x_SC


def _gather(x_NC: Tensor, index_S: Tensor) -> Tensor:
    x_SC = x_NC.index_select(0, index_S.clamp(min=0))
    return torch.where((index_S >= 0)[:, None], x_SC, 0.0)


def ends(plan: ExpertPlan) -> Tensor:
    """int32 [L], aligned: the row after each expert's last; a view of this backend's own plans."""
    ends_L = plan.offsets[1:]
    return ends_L if ends_L.data_ptr() % _ALIGN == 0 else ends_L.clone()


def real(values_S: Tensor, plan: ExpertPlan) -> Tensor:
    """The values of rows with a token, and 0 for all others, even if they are NaN."""
    row_S = torch.arange(len(values_S), dtype=torch.int32, device=values_S.device)
    used_S = row_S < plan.offsets[-1]
    if plan.row_index_S is not None:
        used_S = used_S & (plan.row_index_S >= 0)
    return torch.where(used_S, values_S, 0.0)
