"""Suite `fp8`: the expert MLP in FP8 against the same in bf16, interleaved.

Rows are quantised and transposed inside what is timed; FP8 copies of weights are kept, as they are
made once a step. Weight gradients are added to fp32 buffers on both sides.
"""

from dataclasses import replace

import torch

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.scripts.bench.measure import Bench, Call, Sides
from phalanx.scripts.bench.mlp import with_backward
from phalanx.scripts.bench.problems import SWIGLU, Experts, dirichlet, error, experts
from phalanx.scripts.bench.records import Record
from phalanx.scripts.bench.shapes import FP8, Shape

BF16, EIGHT = "bf16", "fp8"
RECIPES = {BF16: None, EIGHT: Fp8Block()}
TOLERANCE = 0.08
"""Of the recipe: rounding to e4m3 costs 2 to 6 % of the norm."""


def mlp(p: Experts, spec: MLPSpec) -> Call:
    """The forward pass, without gathering."""
    plan = ExpertPlan(None, p.prob_S, p.offsets, None, None, p.order_L)
    return lambda: grouped_mlp(p.x_SD, MLPWeights(p.w1, p.w2), plan, spec)


def suite(bench: Bench, shape: Shape) -> list[Record]:
    p = experts(shape, dirichlet(shape[0], shape[3]), bench.clock.device)
    for leaf in (p.x_SD, p.w1, p.w2):
        leaf.requires_grad_()
    sides = bench.sides("fp8", shape)
    spec = MLPSpec(SWIGLU, bench.backend, accumulate=True, keep_fp8=True)
    specs = {side: replace(spec, recipe=recipe) for side, recipe in RECIPES.items()}
    made = [_checked(sides, p, specs)]
    for w in (p.w1, p.w2):
        w.main_grad = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
    for side, how in specs.items():
        forward = mlp(p, how)
        sides.add(side, "forward", forward)
        both = with_backward(forward, [p.x_SD, p.w1, p.w2], p.dy_SD)
        sides.add(side, "both", both)
    sides.run()
    for what, flops in (("forward", p.forward_flops), ("backward", 2 * p.forward_flops)):
        made += _compared(sides, what, flops)
    return [*made, *sides.lost]


def _compared(sides: Sides, what: str, flops: float) -> list[Record]:
    before = sides.time(BF16, what)
    bars = FP8[sides.shape].of(what) if sides.shape in FP8 else None
    ms = None if before is None else before.ms
    made = sides.record(BF16, what, flops=flops)
    return made + sides.record(EIGHT, what, flops=flops, other=ms, bars=bars)


def _checked(sides: Sides, p: Experts, specs: dict[str, MLPSpec]) -> Record:
    """All results in FP8 beside those in bf16."""
    found = []
    for spec in specs.values():
        out = mlp(p, spec)()
        grads = torch.autograd.grad(out, [p.x_SD, p.w1, p.w2], p.dy_SD)
        found.append([out.detach(), *grads])
    errors = [error(a, b) for a, b in zip(found[1], found[0], strict=True)]
    names = ("y", "dx", "dw1", "dw2")
    note = ", ".join(f"{name} {value:.1e}" for name, value in zip(names, errors, strict=True))
    wrong = not all(1e-3 < value <= TOLERANCE for value in errors)
    return Record("fp8", sides.shape, "check", "relative error", "", note=note, failed=wrong)
