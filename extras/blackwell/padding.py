"""Expert rows for cuDNN: the rows of every expert padded to 256 with zeros.

A plan of `kernels.expert_mlp.sort_pairs` with `align` has index -1 and probability 0 in such a row.

Legend: N rows of x, S expert rows, L local experts.
"""

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.calls import Operand
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.torch_grouped import as_one_kernel

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
