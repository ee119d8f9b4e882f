"""Blocks of a matrix in flat slices of it, which begin and end anywhere, as optimizers shard them.

All of it is elementwise or a sum in a fixed order, without a host read: it can be captured.

Legend: R rows of all experts' matrices, one below the other; C columns, B columns of a block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.parallel.megatron.updated import row_pieces


def zero_dead_(flat: Tensor, start: int, dead_rows: Tensor, block: int) -> None:
    """Fill dead blocks of a slice with zeros, whatever it holds.

    Args:
        flat: contiguous elements from `start` on of a matrix [R, C], of any dtype.
        dead_rows: bool [R, C / B].
    """
    for piece, row, column in _pieces(flat, start, dead_rows.size(1) * block):
        if column is None:
            here = dead_rows[row : row + len(piece), :, None]
            piece.unflatten(1, (-1, block)).masked_fill_(here, 0)
        else:
            of_row = dead_rows[row, :, None].expand(-1, block).reshape(-1)
            piece[0].masked_fill_(of_row[column : column + piece.size(1)], 0)


def squares(flat: Tensor, start: int, rows: int, columns: int, block: int) -> Tensor:
    """Sums of squares of the B columns of each row that lie in a slice: fp32 [R, C / B].

    `flat` and `start` are those of `zero_dead_`; elements outside the slice count as zeros.
    """
    total = torch.zeros(rows, columns // block, dtype=torch.float32, device=flat.device)
    for piece, row, column in _pieces(flat, start, columns):
        if column is not None:
            whole = piece.new_zeros(1, columns)
            whole[:, column : column + piece.size(1)] = piece
            piece = whole
        norm = torch.linalg.vector_norm(
            piece.unflatten(1, (-1, block)), dim=-1, dtype=torch.float32
        )
        total[row : row + len(piece)] += norm.square()
    return total


def _pieces(flat: Tensor, start: int, columns: int) -> Iterator[tuple[Tensor, int, int | None]]:
    """(rows, first row, None), or (part of one row [1, ..], row, first column)."""
    for begin, end in row_pieces(start, start + flat.numel(), columns):
        piece, (row, column) = flat[begin - start : end - start], divmod(begin, columns)
        if (end - begin) % columns:
            yield piece[None], row, column
        else:
            yield piece.view(-1, columns), row, None
