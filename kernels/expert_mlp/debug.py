"""Checks of values under PHALANX_DEBUG=1: they read the device, so that the host waits for it.

Without them an expert id that does not exist counts as none, and a plan is not checked.
"""

import os

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan

VARIABLE = "PHALANX_DEBUG"


def on() -> bool:
    """True if checks run: never while a CUDA graph is captured or torch.compile traces."""
    if os.environ.get(VARIABLE, "0") in ("", "0") or torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def check_expert_ids(topk_idx: Tensor, experts: int) -> None:
    """Raise ValueError for the first id that is not from -1 to `experts` - 1."""
    fix = f"choose an expert from 0 to {experts - 1}, or -1 for none"
    _check("topk_idx", topk_idx, -1, experts, fix)


def check_plan(plan: ExpertPlan, tokens: int) -> None:
    """Raise ValueError for the first invalid index of a plan.

    Args:
        plan: a plan of the expert MLP; `row_index_S` is not checked in the padding. A row without a
            token, with index -1, must have the probability 0.
        tokens: rows of x.
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
