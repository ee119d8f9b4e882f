"""The routing plan of one rank as a value: which rows its experts read, and where results go.

`kernels.routing.plan` creates it, every backend of the expert MLP reads it. It can be split in two,
for operations that take the weights of some of the experts.

Legend: N rows of x, K expert slots of a row, L local experts, S expert rows (static), P experts of
a plan before it was split.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertPlan(NamedTuple):
    """Expert rows offsets[e] up to offsets[e + 1] are local expert e's; the rest is padding.

    With a backend that pads the rows of each expert (`pads_rows_to`), an expert's last rows may
    belong to no token: their index is -1 and their probability 0.
    """

    row_index_S: Tensor | None
    """int32: row of x that expert row s reads; 0 in the padding. None: expert row s reads row s."""
    row_prob_S: Tensor | None
    """fp32: routing probability of expert row s, differentiable; 0 in the padding. None: 1."""
    offsets: Tensor
    """int32 [L + 1]: first expert row of each local expert, not decreasing, clamped to S."""
    inverse_NK: Tensor | None
    """int32: expert row of a (row of x, slot) pair; -1 if its expert is elsewhere or past S.
    None: expert rows are not summed."""
    needed: Tensor | None = None
    """int32 scalar: expert rows of all pairs that are local; above S the plan has overflowed."""
    order_L: Tensor | None = None
    """int32: local experts in the order in which the fused scheduler takes them; None: its own
    order."""
    slot_offsets_P: Tensor | None = None
    """int32 [P + 1], only in the second part of a split plan: offsets of all experts, of which the
    last are its own; expert rows before offsets[0] belong to the first part. None in all other
    plans."""

    def split(self, count: int) -> "tuple[ExpertPlan, ExpertPlan]":
        """Plans of the first `count` experts and of those behind them, without order."""
        return (
            self._replace(offsets=self.offsets[: count + 1], order_L=None),
            self._replace(offsets=self.offsets[count:], order_L=None, slot_offsets_P=self.offsets),
        )

    @property
    def all_offsets(self) -> Tensor:
        """Offsets of all experts up to the last of this plan."""
        return self.offsets if self.slot_offsets_P is None else self.slot_offsets_P

    def relocated(self, new_offsets: Callable[[Tensor], Tensor]) -> "ExpertPlan":
        """The same experts, whose rows start at `new_offsets` of the offsets of all experts."""
        all_P = new_offsets(self.all_offsets)
        offsets = all_P[len(all_P) - len(self.offsets) :]
        return self._replace(offsets=offsets, slot_offsets_P=all_P if self.is_behind else None)

    @property
    def is_behind(self) -> bool:
        """True for the second part of a split plan, whose rows follow those of the first."""
        return self.slot_offsets_P is not None

    def select(self, value_P: Tensor) -> Tensor:
        """The entries of this plan's experts in a tensor over all experts."""
        L = len(self.offsets) - 1
        return value_P[len(value_P) - L :] if self.is_behind else value_P[:L]


def one_group(x_ND: Tensor) -> ExpertPlan:
    """The plan of a dense MLP: one expert that has all rows of x."""
    N = x_ND.shape[0]
    # Created on the device: a tensor of Python numbers would be copied there.
    ends = torch.arange(0, N + 1, N, dtype=torch.int32, device=x_ND.device) if N else None
    offsets = torch.zeros(2, dtype=torch.int32, device=x_ND.device) if ends is None else ends
    return ExpertPlan(None, None, offsets, None)
