"""Suite `block_sparse`: the expert MLP over living blocks of its weights, against all blocks.

Both sides make the same calls of a backend, with sorted rows: forward is fc1 with its activation
and fc2; backward their data gradients and weight gradients, added to fp32 sums.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.extras.block_sparse.kernels.backend import SparseFused
from phalanx.extras.block_sparse.kernels.lists import BLOCK, Blocks
from phalanx.kernels.expert_mlp.backend import BackendOfParts
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.launch_options import DEFAULT
from phalanx.kernels.sm90.experts.backend import Fused
from phalanx.scripts.lab.bench.problems import SWIGLU, Experts, dirichlet, experts
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import BLOCK_SPARSE, Bars, Shape
from phalanx.scripts.lab.bench.timing import Bench, Case, passes


def suite(bench: Bench, shape: Shape) -> list[Record]:
    p = experts(shape, dirichlet(shape[0], shape[3]), bench.clock.device)
    cases = _sides("all blocks", Fused(DEFAULT), p)
    for density in (1.0, 0.5, 0.25):
        fc1, fc2 = (mask.to(p.device) for mask in masks(shape, density))
        ops = SparseFused(DEFAULT, Blocks(fc1, 2), Blocks(fc2))
        bars = BLOCK_SPARSE.get(density)
        cases += _sides(f"{density:.0%} of the blocks", ops, p, bars, against="all blocks")
    return bench.timings("block_sparse", shape).measure(cases)


def masks(shape: Shape, density: float) -> tuple[Tensor, Tensor]:
    """Living blocks of fc1 [L, F / 128, D / 128] and fc2, drawn, as many for each expert."""
    _, D, F, L = shape
    f, d = F // BLOCK, D // BLOCK
    g, living = torch.Generator().manual_seed(0), round(density * f * d)
    drawn = (torch.rand(L, f * d, generator=g).argsort(-1) < living for _ in range(2))
    fc1, fc2 = drawn
    return fc1.view(L, f, d), fc2.view(L, d, f)


def _sides(
    name: str, ops: BackendOfParts, p: Experts, bars: Bars | None = None, **judged: str
) -> Sequence[Case]:
    plan = ExpertPlan(None, p.prob_S, p.offsets, None, None, p.order_L)
    fc1, fc2 = Linear(p.w1, parts=2), Linear(p.w2)
    sums = [torch.zeros(w.shape, device=p.device) for w in (p.w1, p.w2)]

    def forward() -> tuple[Tensor, Tensor]:
        h_SH, a_SF = ops.fc1_act(Fc1Call(p.x_SD, fc1, plan, SWIGLU))
        assert h_SH is not None
        return h_SH, ops.rows(RowsCall(a_SF, fc2, plan))

    def both() -> Tensor:
        h_SH, _ = forward()
        dy = Operand(p.dy_SD, gradient=True)
        made = ops.fc2_dgrad_dact(Fc2DgradCall(dy, fc2, h_SH, plan, SWIGLU))
        dx_SD = ops.rows(RowsCall(made.dh_SH, fc1.transposed, plan))
        into = [Buffer(out, add=True) for out in sums]
        dh = Operand(made.dh_SH, parts=2, gradient=True)
        ops.wgrad(WgradCall(dh, Operand(p.x_SD), plan, into[0]))
        ops.wgrad(WgradCall(dy, Operand(made.a_SF), plan, into[1]))
        return dx_SD

    return [*passes(name, forward, both, p.forward_flops, bars, **judged)]
