"""Suite `layer`: a whole MoE layer with its router, against SonicMoE.

Both route by a softmax over the top K logits, ties to the lower expert. Ours is one autograd
Function over the operations of the backend, and a composition of public functions. SonicMoE
interleaves gate and up rows: the same weights, permuted for our kernels.

Legend: T tokens, D hidden, F expert width, H = 2F, E experts, K experts per token.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from phalanx.kernels.expert_mlp.backend import Backend, provider
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, PlanSize
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.sm90.routing.topk import topk, topk_backward
from phalanx.scripts.lab.bench.kernels.mlp import Forward, in_both_modes, verdict, with_backward
from phalanx.scripts.lab.bench.problems import SWIGLU, error, random
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import LAYER, Shape
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, passes, reason

_OURS, _PUBLIC, _SONIC = "ours", "ours, public functions", "sonic"
ROUTING: dict[str, Any] = dict(score="softmax", normalize=True, softmax_over="topk", scale=1.0)
_TOKEN_ERROR, _OTHER_TOKENS = 0.1, 1e-3
"""Relative error above which a token took other experts, and the tolerated share of such tokens."""


class Layer(torch.autograd.Function):
    """out [T, D] from x [T, D], router [E, D], w1 [E, H, D] and w2 [E, D, F]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, top_k: int, ops: Backend
    ) -> Tensor:
        logits = nnf.linear(x, router)
        idx, prob = topk(logits, top_k=top_k, **ROUTING)
        plan = ops.plan(idx, prob, PlanSize(0, w1.shape[0], idx.numel()))
        h, a = ops.fc1_act(Fc1Call(x, Linear(w1), plan, SWIGLU))
        ctx.save_for_backward(x, router, w1, w2, h, logits, idx, prob, *plan)
        ctx.ops = ops
        assert plan.inverse_NK is not None
        return ops.combine(ops.rows(RowsCall(a, Linear(w2), plan)), plan.inverse_NK)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, router, w1, w2, h, logits, idx, prob, *saved = ctx.saved_tensors
        plan, ops, dy = ExpertPlan(*saved), ctx.ops, Operand(dout, gather=True)
        call = Fc2DgradCall(dy, Linear(w2), h, plan, SWIGLU)
        dh, a, dprob_S, *_ = ops.fc2_dgrad_dact(call)
        dw2 = ops.wgrad(WgradCall(dy, Operand(a), plan))
        del a
        dw1 = ops.wgrad(WgradCall(Operand(dh), Operand(x, gather=True), plan))
        dx = ops.rows(RowsCall(dh, Linear(w1).transposed, plan))
        dx = ops.combine(dx, plan.inverse_NK)
        dprob = ops.plan_backward(dprob_S, plan.inverse_NK)
        dlogits = topk_backward(dprob, idx, prob, logits, **ROUTING)
        return dx.addmm_(dlogits, router), dlogits.T @ x, dw1, dw2, None, None


class Choice(torch.autograd.Function):
    """Experts and probabilities of each token, from the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        idx, prob = topk(logits, top_k=top_k, **ROUTING)
        ctx.save_for_backward(idx, prob, logits)
        ctx.mark_non_differentiable(idx)
        return idx, prob

    @staticmethod
    def backward(ctx: Any, _: None, dprob: Tensor) -> tuple[Any, ...]:
        return topk_backward(dprob.contiguous(), *ctx.saved_tensors, **ROUTING), None


def composed(leaves: Sequence[Tensor], top_k: int, backend: str) -> Tensor:
    """The same layer, of x, router, w1 and w2, composed of the library's public functions."""
    x, router, w1, w2 = leaves
    idx, prob = Choice.apply(nnf.linear(x, router), top_k)
    size: dict[str, Any] = dict(first_expert=0, local_experts=w1.shape[0], rows=idx.numel())
    plan = make_plan(idx, prob, **size, backend=backend)
    return grouped_mlp(x, MLPWeights(w1, w2), plan, MLPSpec(SWIGLU, backend))


def sonic(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor, top_k: int) -> Forward:
    """SonicMoE's forward pass; w1 [E, H, D] with interleaved gate and up rows."""
    import sonicmoe  # noqa: F401  for its version
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    def forward() -> Tensor:
        stream = torch.cuda.current_stream().cuda_stream
        weights = (w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None)
        kind = ActivationType.SWIGLU
        return moe_TC_softmax_topk_layer(x, router, *weights, top_k, stream, kind, False)[0]

    return forward


def split_gate_up(w1: Tensor) -> Tensor:
    """[gate; up] from interleaved rows: [E, 2F, D] or its gradient."""
    E, H, D = w1.shape
    return w1.unflatten(1, (H // 2, 2)).transpose(1, 2).reshape(E, H, D)


def leaves_of(shape: Shape, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """x, router, w1 (interleaved rows) and w2, and the gradient of the output."""
    T, D, F, E, _ = shape
    torch.manual_seed(0)
    x, dout = (random(T, D, device=device, scale=0.2) for _ in range(2))
    router = random(E, D, device=device, scale=(3 * D) ** -0.5)
    w1 = random(E, 2 * F, D, device=device, scale=0.02)
    w2 = random(E, D, F, device=device, scale=0.02)
    return [t.requires_grad_() for t in (x, router, w1, w2)], dout


def warm(bench: Bench, shapes: Sequence[Shape]) -> None:
    """Compile our kernels for all shapes, as importing SonicMoE patches the compiler's classes."""
    for shape in shapes:
        small = (8 * shape[4], *shape[1:])
        leaves, dout = leaves_of(small, bench.clock.device)
        leaves[2] = split_gate_up(leaves[2]).detach().requires_grad_()
        out = Layer.apply(*leaves, shape[4], provider(bench.backend))
        torch.autograd.grad(out, leaves, dout)
        bench.clock.wait()
        del leaves, dout, out
        bench.clock.free()


def suite(bench: Bench, shape: Shape) -> list[Record]:
    timings = bench.timings("layer", shape)
    theirs, dout = leaves_of(shape, bench.clock.device)
    K, ops = shape[4], provider(bench.backend)
    x, router, w1, w2 = theirs
    leaves = [x, router, split_gate_up(w1.detach()).requires_grad_(), w2]
    sides: dict[str, tuple[Forward, list[Tensor]]] = {
        _OURS: (lambda: Layer.apply(*leaves, K, ops), leaves),
        _PUBLIC: (lambda: composed(leaves, K, bench.backend), leaves),
    }
    checks: list[Record] = []
    if "sonic" in bench.peers:
        try:
            if "sonicmoe" not in sys.modules:
                warm(bench, bench.shapes.get("layer", [shape]))
            sides[_SONIC] = sonic(x, router, w1, w2, K), theirs
            checks = _checked(timings, sides, dout)
        except Exception as why:
            timings.skip(_SONIC, "", "eager", reason(why), failed=bench.demanded)
            sides.pop(_SONIC, None)
    return [*checks, *timings.measure(in_both_modes(_cases(shape, sides, dout)))]


def _cases(
    shape: Shape, sides: dict[str, tuple[Forward, list[Tensor]]], dout: Tensor
) -> Iterator[Case]:
    T, D, F, _, K = shape
    for side, (forward, leaves) in sides.items():
        both, ours = with_backward(forward, leaves, dout), side != _SONIC
        judged: dict[str, Any] = dict(against=_SONIC if ours else None, ours=ours)
        bars = LAYER.get(shape) if side == _OURS else None
        yield from passes(side, forward, both, 6 * T * K * D * F, bars, **judged)


def _checked(
    timings: Timings, sides: dict[str, tuple[Forward, list[Tensor]]], dout: Tensor
) -> list[Record]:
    results = {}
    for name, (forward, leaves) in sides.items():
        out = forward()
        results[name] = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        del out
    expected = results.pop(_SONIC)
    expected[3] = split_gate_up(expected[3])
    return [compared(timings, name, ours, expected) for name, ours in results.items()]


def compared(timings: Timings, name: str, results: list[Tensor], expected: list[Tensor]) -> Record:
    """Errors of output, dx and weight gradients; a few tokens may have chosen other experts."""
    differs = torch.zeros(expected[0].shape[0], dtype=torch.bool, device=expected[0].device)
    for i in (0, 1):
        size = expected[i].float().norm(dim=1)
        differs |= ~((results[i].float() - expected[i].float()).norm(dim=1) <= _TOKEN_ERROR * size)
    share = differs.float().mean().item()
    same = ~differs
    errors = [
        (label, error(a[same], b[same]) if i < 2 else error(a, b))
        for i, (label, a, b) in enumerate(
            zip(("out", "dx", "drouter", "dw1", "dw2"), results, expected, strict=True)
        )
    ]
    failure = f"{share:.1%} of the tokens are different" if not share <= _OTHER_TOKENS else ""
    return verdict(timings, f"check of {name}", errors, failure)
