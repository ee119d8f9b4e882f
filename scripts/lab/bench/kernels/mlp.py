"""Suite `mlp`: the expert MLP on sorted rows, against the fastest unfused implementation.

Peers: torch._grouped_mm with a compiled SwiGLU * prob, and Transformer Engine's GroupedLinear with
the same. Weight gradients are bf16, as the peers'; a further side adds to fp32 buffers instead.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.scripts.lab.bench.clocks import Call
from phalanx.scripts.lab.bench.problems import (
    BF16,
    SWIGLU,
    Experts,
    dirichlet,
    error,
    experts,
    give_main_grads,
)
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import MLP, Shape
from phalanx.scripts.lab.bench.timing import Bench, Case, Timings, passes, reason

Forward = Callable[[], Tensor]  # a forward pass that returns its output
TOLERANCE = 0.02  # largest relative error between two bf16 implementations
_OURS, _ADDED = "ours", "ours, fp32 +="
_PEERS = ("torch", "te")


def ours(p: Experts, backend: str, *, accumulate: bool = False) -> Forward:
    """The forward pass of the public function, without gathering."""
    plan = ExpertPlan(None, p.prob_S, p.offsets, None, None, p.order_L)
    spec = MLPSpec(SWIGLU, backend, accumulate=accumulate)
    return lambda: grouped_mlp(p.x_SD, MLPWeights(p.w1, p.w2), plan, spec)


def with_backward(forward: Forward, leaves: list[Tensor], dout: Tensor) -> Call:
    """Forward and backward; a leaf whose gradient went elsewhere gets None."""
    return lambda: torch.autograd.grad(forward(), leaves, dout, allow_unused=True)


def in_both_modes(cases: Iterable[Case]) -> list[Case]:
    cases = list(cases)
    return [replace(case, mode=mode) for mode in ("eager", "graph") for case in cases]


def swiglu_prob(h: Tensor, prob: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return (F.silu(gate.float()) * up.float() * prob).to(h.dtype)


def unfused(p: Experts, act: Callable[..., Tensor]) -> tuple[Forward, list[Tensor]]:
    """torch's forward pass, weights in the layout its GEMM prefers, and its leaves."""
    ends, prob = p.offsets[1:].clone(), p.prob_S[:, None]
    w1 = p.w1.detach().mT.contiguous().requires_grad_()
    w2 = p.w2.detach().mT.contiguous().requires_grad_()
    x = p.x_SD

    def forward() -> Tensor:
        h = torch._grouped_mm(x, w1, offs=ends)
        return torch._grouped_mm(act(h, prob), w2, offs=ends)

    return forward, [x, w1, w2]


def transformer_engine(p: Experts, act: Callable[..., Tensor]) -> tuple[Forward, list[Tensor]]:
    """Transformer Engine's forward pass, with weights of its own, and its leaves."""
    import transformer_engine.pytorch as te

    options: dict[str, Any] = dict(bias=False, params_dtype=BF16, device=p.device)
    fc1 = te.GroupedLinear(p.L, p.D, 2 * p.F, **options)
    fc2 = te.GroupedLinear(p.L, p.F, p.D, **options)
    x, prob, counts = p.x_SD, p.prob_S[:, None], p.counts

    def forward() -> Tensor:
        return fc2(act(fc1(x, counts), prob), counts)

    return forward, [x, *fc1.parameters(), *fc2.parameters()]


def suite(bench: Bench, shape: Shape) -> list[Record]:
    p = experts(shape, dirichlet(shape[0], shape[3]), bench.clock.device)
    for leaf in (p.x_SD, p.w1, p.w2):
        leaf.requires_grad_()
    timings = bench.timings("mlp", shape)
    checks = _checked(timings, p)
    give_main_grads((p.w1, p.w2))
    return [*checks, *timings.measure(in_both_modes(_cases(timings, p)))]


def _cases(timings: Timings, p: Experts) -> Iterator[Case]:
    backend, leaves, flops = timings.bench.backend, [p.x_SD, p.w1, p.w2], p.forward_flops
    forward = ours(p, backend)
    both = with_backward(forward, leaves, p.dy_SD)
    judged: dict[str, Any] = dict(against=_PEERS)
    yield from passes(_OURS, forward, both, flops, MLP.get(timings.shape), **judged)
    added = with_backward(ours(p, backend, accumulate=True), leaves, p.dy_SD)
    options: dict[str, Any] = dict(report="backward", forward_of=_OURS)
    yield Case(_ADDED, "both", added, 2 * flops, **options, **judged)
    for name, (forward, leaves) in _peers(timings, p).items():
        both = with_backward(forward, leaves, p.dy_SD)
        yield from passes(name, forward, both, flops, ours=False)


def _peers(timings: Timings, p: Experts) -> dict[str, tuple[Forward, list[Tensor]]]:
    act = torch.compile(swiglu_prob, dynamic=False) if p.device.type == "cuda" else swiglu_prob
    peers = {}
    for name, build in (("torch", unfused), ("te", transformer_engine)):
        if name in timings.bench.peers:
            try:
                peers[name] = build(p, act)
            except Exception as why:
                timings.skip(name, "", "eager", reason(why), failed=timings.bench.demanded)
    return peers


def _checked(timings: Timings, p: Experts) -> list[Record]:
    if "torch" not in timings.bench.peers:
        return []
    forward, leaves = unfused(p, swiglu_prob)
    ours_forward, errors = ours(p, timings.bench.backend), []
    pairs = [(ours_forward(), forward())]
    pairs += zip(
        torch.autograd.grad(pairs[0][0], [p.x_SD, p.w1, p.w2], p.dy_SD),
        torch.autograd.grad(pairs[0][1], leaves, p.dy_SD),
        strict=True,
    )
    for name, (a, b) in zip(("y", "dx", "dw1", "dw2"), pairs, strict=True):
        errors.append((name, error(a.detach(), b.detach().mT if name[:2] == "dw" else b.detach())))
    return [verdict(timings, "check", errors)]


def verdict(
    timings: Timings, side: str, errors: list[tuple[str, float]], other: str = ""
) -> Record:
    """Record of relative errors; failed if one is too large or NaN, or if `other` says why."""
    wrong = [f"{name} above {TOLERANCE}" for name, value in errors if not value <= TOLERANCE]
    wrong += [other] if other else []
    note = ", ".join([*(f"{name} {value:.1e}" for name, value in errors), *wrong])
    head = (timings.suite, timings.shape, side, "relative error", "")
    return Record(*head, note=note, failed=bool(wrong))
