"""Rows of a table that are cleared, or added to, by an index on the device.

Triton kernels on a GPU, whose order of additions depends only on the index; torch elsewhere.

torch's gradient of an embedding is a separate table, zero except for the batch's tokens; adding it
to a buffer is a second pass over the table. 8 thousand tokens need a twentieth of 152 thousand
rows.

Legend: S rows of a tensor, V rows of a table, T indices, D channels.
"""

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import used_rows


@torch.no_grad()
def clear_padding(rows_SD: Tensor, offsets: Tensor) -> None:
    """Set rows from offsets[-1] on, which no expert has and kernels leave unspecified, to 0.

    `rows_SD`: contiguous; `offsets`: int32 [L + 1], first row of each expert.
    """
    if rows_SD.is_cuda:
        from phalanx.kernels.elementwise.rows_triton import clear

        clear(rows_SD, offsets)
        return
    rows_SD.masked_fill_(~used_rows(rows_SD, offsets)[:, None], 0)


@torch.no_grad()
def index_add_(table_VD: Tensor, index_T: Tensor, rows_TD: Tensor) -> None:
    """table[index[t]] += rows[t], each row of the table summed in fp32 and rounded once.

    Args:
        table_VD: fp32 or bf16, contiguous.
        index_T: integers; those outside 0 to V - 1 are ignored.
        rows_TD: bf16 or fp32, contiguous.

    Raises:
        ValueError: shapes that do not fit, or tensors that are not contiguous.
    """
    fits = rows_TD.shape == (*index_T.shape, table_VD.shape[-1]) and index_T.ndim == 1
    if not fits or not (table_VD.is_contiguous() and rows_TD.is_contiguous()):
        raise ValueError(
            f"a table {list(table_VD.shape)}, indices {list(index_T.shape)} and rows "
            f"{list(rows_TD.shape)} must be [V, D], [T] and [T, D], contiguous"
        )
    V = table_VD.shape[0]
    if table_VD.is_cuda:
        from phalanx.kernels.elementwise.rows_triton import add_rows

        key_T, order_T = torch.sort(sort_keys(index_T, V), stable=True)
        add_rows(table_VD, key_T, order_T, rows_TD)
        return
    dtype = torch.promote_types(rows_TD.dtype, torch.float32)
    valid_T = (index_T >= 0) & (index_T < V)
    rows_TD = rows_TD.to(dtype).masked_fill(~valid_T[:, None], 0)
    index_T = index_T.long().masked_fill(~valid_T, 0)
    table_VD.copy_(table_VD.to(dtype).index_add_(0, index_T, rows_TD))


def sort_keys(index_T: Tensor, V: int) -> Tensor:
    """Keys that sort by row, V for none; 32 bits halve the passes of a radix sort."""
    key_T = as_int32(index_T, V)
    return key_T.masked_fill((key_T < 0) | (key_T >= V), V)


def as_int32(index: Tensor, end: int) -> Tensor:
    """The same integers as int32, where those outside 0 to `end` - 1 stay outside.

    A cast alone would keep the lower 32 bits, so that 2^32 became 0. `end` is at most 2^31 - 1; the
    result may be `index` itself.
    """
    if index.dtype.itemsize > 4:
        index = index.long().clamp(-1, end)
    return index.to(torch.int32)
