"""The routing plan of one rank as a value: which rows its experts read, and who reads theirs back.

Made by `kernels.routing.plan`, read by every backend of the expert MLP. Where experts of other
ranks are replicas, it has places for them behind those of a rank's own, and is split in two for
operations that take the weights of either.

Legend: N rows of x, K slots for experts of a row, L local experts, S expert rows kept (static), P
places, of own experts and replicas.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class ExpertPlan(NamedTuple):
    """Expert rows offsets[e] up to offsets[e + 1] are local expert e's; the rest is padding.

    Of a backend whose experts' rows are aligned (`row_multiple`), the last of an expert's may be of
    no token: their index is -1 and their probability 0.
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
    """int32: local experts in the order in which the fused scheduler takes them; None leaves it
    to it."""
    places_P: Tensor | None = None
    """int32 [P + 1], of replicas alone: offsets of all places, whose last ones are theirs; expert
    rows before offsets[0] are others'. None: there are none."""

    def split(self, own: int) -> "tuple[ExpertPlan, ExpertPlan]":
        """The first `own` experts with their rows, and the replicas behind them, neither in an
        order."""
        first, behind = self.offsets[: own + 1], self.offsets[own:]
        return (
            self._replace(offsets=first, order_L=None),
            self._replace(offsets=behind, order_L=None, places_P=self.offsets),
        )

    @property
    def all_offsets(self) -> Tensor:
        """Offsets of all places up to the last of these experts."""
        return self.offsets if self.places_P is None else self.places_P

    def moved(self, starts: Callable[[Tensor], Tensor]) -> "ExpertPlan":
        """The same experts at the rows where `starts` of the offsets of all places puts them."""
        all_P = starts(self.all_offsets)
        of_these = all_P[len(all_P) - len(self.offsets) :]
        return self._replace(offsets=of_these, places_P=all_P if self.behind else None)

    @property
    def behind(self) -> bool:
        """Rows of others lie before those of these experts."""
        return self.places_P is not None

    def of_these(self, value_P: Tensor) -> Tensor:
        """Of a value of each place those of these experts."""
        L = len(self.offsets) - 1
        return value_P[len(value_P) - L :] if self.behind else value_P[:L]


def one_group(x_ND: Tensor) -> ExpertPlan:
    """The plan of a dense MLP: all rows of x are one expert's."""
    N = x_ND.shape[0]
    # Made on the device: a tensor of Python numbers would be copied there.
    ends = torch.arange(0, N + 1, N, dtype=torch.int32, device=x_ND.device) if N else None
    offsets = torch.zeros(2, dtype=torch.int32, device=x_ND.device) if ends is None else ends
    return ExpertPlan(None, None, offsets, None)
