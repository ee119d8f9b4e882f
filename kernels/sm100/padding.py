"""Expert rows as cuDNN takes them: every expert's padded to 256, with rows of zeros.

A plan of `kernels.routing.sort_pairs` with `align` has index -1 and probability 0 in such a row.

Legend: N rows of x, S expert rows, L local experts.
"""

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Operand
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.torch_grouped import as_one_kernel

_ALIGN = 16
"""Bytes that cuDNN wants every operand to start at a multiple of."""


def gathered(x: Operand, plan: ExpertPlan) -> Tensor:
    """The expert rows of an operand: zeros where a plan's index is -1."""
    if not x.gather or plan.row_index_S is None:
        rows: Tensor = x.matrix
        return rows
    if not len(x.matrix):
        return x.matrix.new_zeros(len(plan.row_index_S), x.matrix.shape[1])
    made: Tensor = as_one_kernel(_pick, x.matrix, plan.row_index_S)
    return made


def _pick(x_NC: Tensor, index_S: Tensor) -> Tensor:
    picked_SC = x_NC.index_select(0, index_S.clamp(min=0))
    return torch.where((index_S >= 0)[:, None], picked_SC, 0.0)


def ends(plan: ExpertPlan) -> Tensor:
    """int32 [L]: the row after each expert's last, from 16 bytes on; a view in plans made here."""
    ends_L = plan.offsets[1:]
    return ends_L if ends_L.data_ptr() % _ALIGN == 0 else ends_L.clone()


def real(values_S: Tensor, plan: ExpertPlan) -> Tensor:
    """The values of rows of tokens, and 0 of all others, whatever is there."""
    row_S = torch.arange(len(values_S), dtype=torch.int32, device=values_S.device)
    used_S = row_S < plan.offsets[-1]
    if plan.row_index_S is not None:
        used_S = used_S & (plan.row_index_S >= 0)
    return torch.where(used_S, values_S, 0.0)
