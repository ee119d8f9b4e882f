"""Rows added to indexed rows of a table: the gradient of an embedding.

torch's gradient of an embedding is a separate table, zero except for the batch's tokens; adding it
to a buffer is a second pass over the table. 8 thousand tokens need a twentieth of 152 thousand
rows. A Triton kernel on a GPU, in an order that depends only on the index; torch elsewhere.

Legend: V rows of the table, T indices, D channels.
"""

import torch
from torch import Tensor

from phalanx.kernels.narrow import as_int32


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
        from phalanx.kernels.elementwise.index_add_triton import add_rows

        key_T, order_T = torch.sort(sort_keys(index_T, V), stable=True)
        add_rows(table_VD, key_T, order_T, rows_TD)
        return
    dtype = torch.promote_types(rows_TD.dtype, torch.float32)
    valid_T = (index_T >= 0) & (index_T < V)
    rows_TD = rows_TD.to(dtype).masked_fill(~valid_T[:, None], 0)
    index_T = index_T.long().masked_fill(~valid_T, 0)
    table_VD.copy_(table_VD.to(dtype).index_add_(0, index_T, rows_TD))


def sort_keys(index_T: Tensor, V: int) -> Tensor:
    """Keys that sort indices by their row, those without a row last, as V.

    The keys have 32 bits, which halves the passes of a radix sort.
    """
    key_T = as_int32(index_T, V)
    return key_T.masked_fill((key_T < 0) | (key_T >= V), V)
