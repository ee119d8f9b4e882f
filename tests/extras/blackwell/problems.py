"""Problems of `tests.kernels.problems` with every expert's rows padded to 256."""

from dataclasses import replace

import torch

from phalanx.kernels.expert_mlp.backend import provider, rows_for
from phalanx.kernels.expert_mlp.expert_plan import PlanSize
from tests.kernels.problems import Problem, make, random_choice


def padded(act, *, L: int = 3, choice=None, room: int = 0, **sizes) -> Problem:
    """A problem of bf16 whose plan is the adapter's, with `room` rows more than are needed."""
    choice = random_choice(40, 3, list(range(L))) if choice is None else choice
    p = make(act, torch.bfloat16, choice=choice, L=L, **(dict(D=64, width=64) | sizes))
    idx = torch.tensor(choice, dtype=torch.int32)
    g = torch.Generator().manual_seed(3)
    prob = torch.rand(idx.shape, generator=g)
    size = PlanSize(0, L, rows_for(idx.numel(), L, "cudnn") + room)
    plan = provider("cudnn").plan(idx, prob, size)
    return replace(
        p,
        index=plan.row_index_S,
        prob=plan.row_prob_S,
        offsets=plan.offsets,
        inverse=plan.inverse_NK,
    )
