"""Suite `fp8`: the expert MLP and its kernels in FP8 against the same in bf16, interleaved.

Rows are quantised and transposed inside what is timed; FP8 copies of weights are kept, as they are
made once a step. Weight gradients are added to fp32 buffers on both sides.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Linear, Operand
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.expert_mlp.providers import provider
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


def operations(p: Experts, backend: str, recipe: Fp8Block | None) -> dict[str, tuple[Call, float]]:
    """Each GEMM of the MLP and what it performs; operands are made beforehand, but for those of
    weight gradients, which are transposed in time."""
    ops: Any = provider(backend, recipe=recipe, keep_fp8=True)
    plan = ExpertPlan(None, p.prob_S, p.offsets, None, None, p.order_L)
    fc1 = Linear(p.w1, parts=2, source=p.w1)
    fc2 = Linear(p.w2, source=p.w2)
    x, dy = ops.quantize(p.x_SD), ops.quantize(p.dy_SD, gradient=True)
    h, a = ops.fc1_act(x, fc1, plan, SWIGLU)
    made = ops.fc2_dgrad_dact(Operand(dy), fc2, h, plan, SWIGLU)
    into = Buffer(torch.zeros(p.w2.shape, device=p.device), add=True)
    one = 2 * p.S * p.D * p.F

    def of_fc2() -> Tensor:
        d: Tensor = ops.wgrad(ops.columns(Operand(dy), plan), Operand(made.a_SF), plan, into)
        return d

    return {
        "fc1, activation": (partial(ops.fc1_act, x, fc1, plan, SWIGLU), 2 * one),
        "fc2": (partial(ops.rows, a, fc2, plan), one),
        "fc2 dgrad, activation": (
            partial(ops.fc2_dgrad_dact, Operand(dy), fc2, h, plan, SWIGLU),
            one,
        ),
        "fc1 dgrad": (partial(ops.rows, made.dh_SH, fc1.transposed, plan), 2 * one),
        "fc2 wgrad": (of_fc2, one),
    }


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
        with torch.no_grad():
            flops = operations(p, bench.backend, how.recipe)
            for name, (call, _) in flops.items():
                sides.add(side, name, call)
    sides.run()
    whole = {"forward": p.forward_flops, "backward": 2 * p.forward_flops}
    for what, work in (whole | {name: work for name, (_, work) in flops.items()}).items():
        made += _compared(sides, what, work)
    return [*made, *sides.lost]


def _compared(sides: Sides, what: str, flops: float) -> list[Record]:
    before = sides.time(BF16, what)
    bars = FP8.get(sides.shape, {}).get(what)
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
