"""Scales of blocks in the order of the tensor cores: as cuDNN takes them, and back.

128 rows by 4 blocks along the contraction are an atom of 512 bytes: row r, block b of it is at
(r % 32) * 16 + (r // 32) * 4 + b (PTX ISA, tcgen05.mma, scale factor layout). Atoms of one run of
128 rows follow one another along the contraction, then come those of the next 128 rows. In a
weight gradient, which contracts over tokens, every expert has a matrix of its own, and these
follow one another.

Legend: R rows, B blocks along the contraction, C channels, L experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_ROWS, _BLOCKS = 128, 4
_ATOM = _ROWS * _BLOCKS


def pack(scale: Tensor) -> Tensor:
    """[..., R, B] of one byte -> [bytes], every matrix filled up to whole atoms with zeros."""
    return _atoms(scale).flatten()


def unpack(packed: Tensor, rows: int, blocks: int) -> Tensor:
    """The inverse of `pack`, [rows, blocks], of one matrix."""
    across = -(-blocks // _BLOCKS)
    atoms = packed.view(-1, across, 32, _ROWS // 32, _BLOCKS)
    whole = atoms.permute(0, 3, 2, 1, 4).reshape(-1, across * _BLOCKS)
    return whole[:rows, :blocks]


def pack_columns(scale_CB: Tensor, offsets: Tensor, block: int) -> Tensor:
    """[C, B] of one byte, blocks of `block` tokens -> [bytes], expert after expert.

    Args:
        offsets: int32 [L + 1], first token of each expert: multiples of 4 blocks.
    """
    atoms = _atoms(scale_CB).flatten(2)  # [C / 128, B / 4, bytes]
    down, across = atoms.shape[:2]
    starts = offsets // (block * _BLOCKS)
    atom_B = torch.arange(across, dtype=torch.int32, device=atoms.device)
    # Behind the last expert's are those that nobody reads.
    expert_B = torch.searchsorted(starts[1:], atom_B, right=True)
    starts = F.pad(starts, (0, 1), value=across)
    first_B, count_B = starts[expert_B], (starts[expert_B + 1] - starts[expert_B])
    row = torch.arange(down, dtype=torch.int32, device=atoms.device)[:, None]
    place = down * first_B + row * count_B + atom_B - first_B
    packed = torch.empty_like(atoms).flatten(0, 1)
    packed[place.flatten().long()] = atoms.flatten(0, 1)
    return packed.flatten()


def _atoms(scale: Tensor) -> Tensor:
    """[..., R / 128, B / 4, 32, 4, 4]."""
    missing = -scale.shape[-1] % _BLOCKS, -scale.shape[-2] % _ROWS
    whole = F.pad(scale, (0, missing[0], 0, missing[1]))
    atoms = whole.unflatten(-1, (-1, _BLOCKS)).unflatten(-3, (-1, _ROWS // 32, 32))
    return atoms.movedim(-2, -4).transpose(-3, -2).contiguous()
