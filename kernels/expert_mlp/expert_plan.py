"""The routing plan of one rank: which rows its experts read, and where results go.

`kernels.routing.plan` creates the value, every backend of the expert MLP reads it. It can be split
in two, for operations that take the weights of some of the experts.

`sort_pairs` is the plan of every backend without kernels for it, and the definition for the others,
in tensor code: stable sorts and searches, without a host read or an atomic, the same bit for bit on
CPU and GPU. Under PHALANX_DEBUG=1 checks read the device, so that the host waits for it; without
them an expert id that does not exist counts as none, and a plan is not checked.

Legend: N rows of x, K expert slots of a row, L local experts, S expert rows (static), P experts of
a plan before it was split.
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class PlanSize(NamedTuple):
    """Sizes of a plan, other than those of the routing."""

    first_expert: int  # global id of local expert 0
    local_experts: int  # L
    rows: int  # S; if more are needed, the last experts lack rows


class ExpertPlan(NamedTuple):
    """Expert rows offsets[e] up to offsets[e + 1] are local expert e's; the rest is padding.

    With a backend that pads the rows of each expert (`pads_rows_to`), an expert's last rows may
    belong to no token: their index is -1 and their probability 0.
    """

    row_index_S: Tensor | None  # int32 row of x that row s reads; 0 in the padding. None: row s
    row_prob_S: Tensor | None  # fp32, differentiable; 0 in the padding. None: 1
    offsets: Tensor  # int32 [L + 1]: first row of each expert, not decreasing, clamped to S
    inverse_NK: Tensor | None
    """int32 expert row of a (row of x, slot) pair; -1 if its expert is elsewhere or past S. None:
    expert rows are not summed."""
    needed: Tensor | None = None  # int32: rows of all local pairs; above S it overflowed
    order_L: Tensor | None = None  # int32: order of the fused scheduler; None: its own
    slot_offsets_P: Tensor | None = None
    """int32 [P + 1], only in the second part of a split plan: offsets of all experts, of which the
    last are its own; expert rows before offsets[0] belong to the first part."""

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
        """True for the second part of a split plan, whose rows follow the first's."""
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


VARIABLE = "PHALANX_DEBUG"


def is_debugging() -> bool:
    """True if checks run: never while a CUDA graph is captured or torch.compile traces."""
    if os.environ.get(VARIABLE, "0") in ("", "0") or torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_expert_ids(topk_idx: Tensor, experts: int) -> None:
    """Raise ValueError for the first id that is not from -1 to `experts` - 1."""
    fix = f"choose an expert from 0 to {experts - 1}, or -1 for none"
    _check("topk_idx", topk_idx, -1, experts, fix)


def check_plan(plan: ExpertPlan, tokens: int) -> None:
    """Raise ValueError for the first invalid index of a plan for `tokens` rows of x.

    A row without a token, with index -1, must have the probability 0.
    """
    S = tokens if plan.row_index_S is None else plan.row_index_S.shape[0]
    _check("offsets", plan.offsets, 0, S + 1, f"there are {S} expert rows")
    steps = plan.offsets.diff()
    _check("offsets.diff()", steps, 0, None, "give the experts' first rows in their order")
    used = int(plan.offsets[-1])
    if plan.row_index_S is not None:
        index = plan.row_index_S[:used]
        if plan.row_prob_S is not None:
            index = index.masked_fill((index == -1) & (plan.row_prob_S[:used] == 0), 0)
        _check("row_index_S", index, 0, max(1, tokens), f"x has {tokens} rows")
    if plan.inverse_NK is not None:
        fix = f"offsets end at row {used}; -1 is for no row"
        _check("inverse_NK", plan.inverse_NK, -1, used, fix)


def _check(name: str, values: Tensor, low: int, end: int | None, fix: str) -> None:
    bad = values < low if end is None else (values < low) | (values >= end)
    if values.is_meta or not bad.any():
        return
    position = bad.nonzero()[0].tolist()
    allowed = f"at least {low}" if end is None else f"{low} to {end - 1}"
    raise ValueError(f"{name}{position} is {int(values[tuple(position)])}, not {allowed}: {fix}")


_KEY = torch.int16  # two radix passes on a GPU instead of the four of int32
MAX_EXPERTS = torch.iinfo(_KEY).max  # most experts of a rank, bounded by the sort key


def sort_pairs(
    topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize, *, align: int = 1
) -> ExpertPlan:
    """`Backend.plan` in tensor code: ordered by expert, then received row, then slot.

    `align`: multiple at which an expert's rows start and end. Rows without a token have index -1
    and probability 0, and count as needed; the second entry of the offsets is aligned to 16 bytes.
    """
    if align > 1:
        return _sort_aligned(topk_idx_NK, topk_prob_NK, size, align)
    first_expert, local_experts, rows = size
    key, order, starts = _sorted(topk_idx_NK, first_expert, local_experts)
    offsets, needed = starts.clamp(max=rows), starts[-1].clone()

    row = torch.arange(key.numel(), dtype=torch.int32, device=key.device)
    used = row < offsets[-1]
    inverse = torch.empty_like(row).scatter_(0, order, row.masked_fill(~used, -1))
    token = (order // topk_idx_NK.shape[1]).to(torch.int32).masked_fill(~used, 0)
    prob = topk_prob_NK.flatten().index_select(0, order).masked_fill(~used, 0)
    return ExpertPlan(
        _fit(token, rows), _fit(prob, rows), offsets, inverse.view_as(topk_idx_NK), needed, None
    )


def _sort_aligned(
    topk_idx_NK: Tensor, topk_prob_NK: Tensor, size: PlanSize, align: int
) -> ExpertPlan:
    first_expert, local_experts, rows = size
    key, order, starts = _sorted(topk_idx_NK, first_expert, local_experts)
    counts_L = (starts.diff() + align - 1) // align * align
    offsets = starts.new_empty(local_experts + 4)[3:]  # the second entry is the fifth of 4 bytes
    offsets[0] = 0
    torch.cumsum(counts_L, 0, dtype=torch.int32, out=offsets[1:])
    needed = offsets[-1].clone()

    expert = key.long()
    position = torch.arange(key.numel(), dtype=torch.int32, device=key.device)
    row = position - starts[expert] + offsets[expert]
    offsets.clamp_(max=rows // align * align)
    used = (expert < local_experts) & (row < offsets[-1])
    inverse = torch.empty_like(row).scatter_(0, order, row.masked_fill(~used, -1))
    target = row.masked_fill(~used, rows).long()  # one extra row takes unused pairs
    token = (order // topk_idx_NK.shape[1]).to(torch.int32)
    prob = topk_prob_NK.flatten().index_select(0, order)
    index_S = token.new_full((rows + 1,), -1).scatter_(0, target, token)[:rows]
    prob_S = prob.new_zeros(rows + 1).scatter_(0, target, prob)[:rows]
    return ExpertPlan(index_S, prob_S, offsets, inverse.view_as(topk_idx_NK), needed, None)


def _sorted(topk_idx_NK: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorted local experts of the pairs (L if remote), pair of each, and int32 [L + 1] starts."""
    local_NK = topk_idx_NK - first
    remote_NK = (local_NK < 0) | (local_NK >= experts)
    key = local_NK.masked_fill(remote_NK, experts).flatten().to(_KEY)
    key, order = torch.sort(key, stable=True)
    numbers = torch.arange(experts + 1, dtype=_KEY, device=key.device)
    return key, order, torch.searchsorted(key, numbers, out_int32=True)


def gather_pairs(dprob_S: Tensor, inverse_NK: Tensor) -> Tensor:
    """`kernels.expert_mlp.backend.Backend.plan_backward`."""
    grad = dprob_S.index_select(0, inverse_NK.flatten().clamp(min=0)).view_as(inverse_NK)
    return grad.masked_fill(inverse_NK < 0, 0)


def gather_rows(x_ND: Tensor, index_S: Tensor, offsets: Tensor) -> Tensor:
    """Row index[s] of x for every s; any row in the padding, for any content of `index`."""
    if not x_ND.shape[0]:
        return x_ND.new_zeros(index_S.shape[0], x_ND.shape[1])
    return x_ND.index_select(0, index_S.masked_fill(~used_rows(index_S, offsets), 0))


def used_rows(expert_rows: Tensor, offsets: Tensor) -> Tensor:
    """bool [S]: which of the expert rows, of any tensor [S, ...], are not padding."""
    row_S = torch.arange(expert_rows.shape[0], dtype=torch.int32, device=expert_rows.device)
    return row_S < offsets[-1]


def _fit(x: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, rows - x.shape[0]))
