"""Suite `fp8`: the expert MLP in FP8 against the same in bf16, interleaved.

Quantising and transposing rows is timed; FP8 copies of weights are cached, as they are made once a
step. Weight gradients are added to fp32 buffers on all sides. Peer: Transformer Engine's
GroupedLinear in its blockwise recipe, with a compiled SwiGLU * prob between.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.quantize.recipe import Fp8Block
from phalanx.scripts.lab.bench.kernels.mlp import Forward, swiglu_prob, with_backward
from phalanx.scripts.lab.bench.problems import (
    SWIGLU,
    Experts,
    dirichlet,
    error,
    experts,
    give_main_grads,
)
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import FP8, FP8_TE, Shape
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, passes, reason

BF16, EIGHT, PEER = "bf16", "fp8", "te"
RECIPES = {BF16: None, EIGHT: Fp8Block()}
TOLERANCE = 0.08  # largest relative error: rounding to e4m3 costs 2 to 6 % of the norm


def mlp(p: Experts, spec: MLPSpec) -> Forward:
    """The forward pass, without gathering."""
    plan = ExpertPlan(None, p.prob_S, p.offsets, None, None, p.order_L)
    return lambda: grouped_mlp(p.x_SD, MLPWeights(p.w1, p.w2), plan, spec)


def transformer_engine(p: Experts) -> tuple[Forward, list[Tensor]]:
    """Transformer Engine's forward pass, with weights of its own, and its leaves.

    The first call makes FP8 copies of the weights.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling

    options: dict[str, Any] = dict(bias=False, params_dtype=torch.bfloat16, device=p.device)
    fc1 = te.GroupedLinear(p.L, p.D, 2 * p.F, fuse_wgrad_accumulation=True, **options)
    fc2 = te.GroupedLinear(p.L, p.F, p.D, fuse_wgrad_accumulation=True, **options)
    weights = [*fc1.parameters(), *fc2.parameters()]
    give_main_grads(weights)
    x, prob, counts = p.x_SD, p.prob_S[:, None], p.counts
    act = torch.compile(swiglu_prob, dynamic=False)
    first = True

    def forward() -> Tensor:
        nonlocal first
        microbatch, first = dict(is_first_microbatch=first), False
        with te.autocast(enabled=True, recipe=Float8BlockScaling()):
            return fc2(act(fc1(x, counts, **microbatch), prob), counts, **microbatch)

    return forward, [x, *weights]


def suite(bench: Bench, shape: Shape) -> list[Record]:
    p = experts(shape, dirichlet(shape[0], shape[3]), bench.clock.device)
    for leaf in (p.x_SD, p.w1, p.w2):
        leaf.requires_grad_()
    timings = bench.timings("fp8", shape)
    spec = MLPSpec(SWIGLU, bench.backend, accumulate=True, keep_fp8=True)
    specs = {side: replace(spec, recipe=recipe) for side, recipe in RECIPES.items()}
    check = _checked(timings, p, specs)
    give_main_grads((p.w1, p.w2))
    return [check, *timings.measure(_cases(timings, p, specs))]


def _cases(timings: Timings, p: Experts, specs: dict[str, MLPSpec]) -> Iterator[Case]:
    """FP8 against bf16, and both passes together against Transformer Engine."""
    bench, shape, flops = timings.bench, timings.shape, p.forward_flops
    for side, spec in specs.items():
        forward = mlp(p, spec)
        both = with_backward(forward, [p.x_SD, p.w1, p.w2], p.dy_SD)
        judged: dict[str, Any] = dict(bars=FP8.get(shape), against=BF16) if side == EIGHT else {}
        yield from passes(side, forward, both, flops, **judged)
    if PEER not in bench.peers:
        return
    try:
        forward, leaves = transformer_engine(p)
    except Exception as why:
        timings.skip(PEER, "both", "graph", reason(why), failed=bench.demanded)
        return
    judged = dict(against=PEER, bars=FP8_TE.get(shape), note="of te")
    yield Case(EIGHT, "both", None, 3 * flops, **judged)
    yield Case(PEER, "both", with_backward(forward, leaves, p.dy_SD), 3 * flops, ours=False)


def _checked(timings: Timings, p: Experts, specs: dict[str, MLPSpec]) -> Record:
    results = []
    for spec in specs.values():
        out = mlp(p, spec)()
        grads = torch.autograd.grad(out, [p.x_SD, p.w1, p.w2], p.dy_SD)
        results.append([out.detach(), *grads])
    errors = [error(a, b) for a, b in zip(results[1], results[0], strict=True)]
    names = ("y", "dx", "dw1", "dw2")
    note = ", ".join(f"{name} {value:.1e}" for name, value in zip(names, errors, strict=True))
    wrong = not all(1e-3 < value <= TOLERANCE for value in errors)
    return Record("fp8", timings.shape, "check", "relative error", "", note=note, failed=wrong)
