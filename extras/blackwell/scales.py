"""Block scales in the order of the tensor cores, as cuDNN reads them, and the inverse.

128 rows by 4 blocks along the contraction are an atom of 512 bytes: row r, block b of it is at
(r % 32) * 16 + (r // 32) * 4 + b (PTX ISA, tcgen05.mma, scale factor layout). Atoms of the same 128
rows are contiguous along the contraction, followed by those of the next 128 rows. In a weight
gradient, which contracts over tokens, every expert has its own matrix, one after the other.

Legend: R rows, B blocks along the contraction, C channels, L experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

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

    Args:
        offsets: int32 [L + 1], first token of each expert: multiples of 4 blocks.
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
