"""Suite `mlp`: the expert MLP on sorted rows, against the fastest unfused implementation.

Peers: torch._grouped_mm with a compiled SwiGLU * prob, and Transformer Engine's GroupedLinear with
the same. Weight gradients are bf16, as the peers'; a further side adds to fp32 buffers instead.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.scripts.bench.measure import Bench, Call, Sides, reason
from phalanx.scripts.bench.problems import BF16, SWIGLU, Experts, dirichlet, error, experts
from phalanx.scripts.bench.records import Record
from phalanx.scripts.bench.shapes import MLP, Shape

MODES = ("eager", "graph")
TOLERANCE = 0.02
"""Largest relative error between two bf16 implementations."""
_OURS, _ADDED = "ours", "ours, fp32 +="
_PEERS = ("torch", "te")


def ours(p: Experts, backend: str, *, accumulate: bool = False) -> Call:
    """The forward pass of the public function, without gathering."""
    plan = ExpertPlan(None, p.prob_S, p.offsets, None, None, p.order_L)
    spec = MLPSpec(SWIGLU, backend, accumulate=accumulate)
    return lambda: grouped_mlp(p.x_SD, MLPWeights(p.w1, p.w2), plan, spec)


def with_backward(forward: Callable[[], Tensor], leaves: list[Tensor], dout: Tensor) -> Call:
    """Forward and backward; a leaf whose gradient went elsewhere gets None."""
    return lambda: torch.autograd.grad(forward(), leaves, dout, allow_unused=True)


def swiglu_prob(h: Tensor, prob: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return (F.silu(gate.float()) * up.float() * prob).to(h.dtype)


def unfused(p: Experts, act: Callable[..., Tensor]) -> tuple[Call, list[Tensor]]:
    """torch's forward pass, weights in the layout its GEMM prefers, and its leaves."""
    ends, prob = p.offsets[1:].clone(), p.prob_S[:, None]
    w1 = p.w1.detach().mT.contiguous().requires_grad_()
    w2 = p.w2.detach().mT.contiguous().requires_grad_()
    x = p.x_SD

    def forward() -> Tensor:
        h = torch._grouped_mm(x, w1, offs=ends)
        return torch._grouped_mm(act(h, prob), w2, offs=ends)

    return forward, [x, w1, w2]


def transformer_engine(p: Experts, act: Callable[..., Tensor]) -> tuple[Call, list[Tensor]]:
    """Transformer Engine's forward pass, with weights of its own, and its leaves."""
    import transformer_engine.pytorch as te

    options = dict(bias=False, params_dtype=BF16, device=p.device)
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
    sides = bench.sides("mlp", shape)
    records = _checked(sides, p) + _measured(sides, p)
    return [*records, *sides.skipped]


def _measured(sides: Sides, p: Experts) -> list[Record]:
    bench = sides.bench
    leaves = [p.x_SD, p.w1, p.w2]
    forward = ours(p, bench.backend)
    sides.add(_OURS, "forward", forward, modes=MODES)
    sides.add(_OURS, "both", with_backward(forward, leaves, p.dy_SD), modes=MODES)
    for w in (p.w1, p.w2):
        w.main_grad = torch.zeros(w.shape, dtype=torch.float32, device=w.device)
    added = with_backward(ours(p, bench.backend, accumulate=True), leaves, p.dy_SD)
    sides.add(_ADDED, "both", added, modes=MODES)
    act = torch.compile(swiglu_prob, dynamic=False) if p.device.type == "cuda" else swiglu_prob
    for name, build in (("torch", unfused), ("te", transformer_engine)):
        if name in bench.peers:
            try:
                forward, leaves = build(p, act)
            except Exception as why:
                sides.skip(name, "", "eager", reason(why), failed=bench.demanded)
                continue
            both = with_backward(forward, leaves, p.dy_SD)
            sides.add(name, "forward", forward, modes=MODES, ours=False)
            sides.add(name, "both", both, modes=MODES, ours=False)
    sides.run()
    for key, times in list(sides.times.items()):
        if key.side == _OURS and key.pass_name == "forward":
            sides.times[key._replace(side=_ADDED)] = times
    records = []
    for mode in MODES:
        for pass_name, flops in (("forward", p.forward_flops), ("backward", 2 * p.forward_flops)):
            records += _compared(sides, pass_name, mode, flops)
    return records


def _compared(sides: Sides, pass_name: str, mode: str, flops: float) -> list[Record]:
    """Records of a pass; ours with the ratio to the fastest peer."""
    peers = [sides.time(name, pass_name, mode) for name in _PEERS]
    best = min((time.ms for time in peers if time is not None), default=None)
    bars = MLP[sides.shape].of(pass_name) if sides.shape in MLP else None
    records = sides.record(_OURS, pass_name, mode, flops=flops, other=best, bars=bars)
    if pass_name == "backward":
        records += sides.record(_ADDED, pass_name, mode, flops=flops, other=best)
    for name in _PEERS:
        records += sides.record(name, pass_name, mode, flops=flops)
    return records


def _checked(sides: Sides, p: Experts) -> list[Record]:
    """Compare all results with torch's, if it is a peer."""
    if "torch" not in sides.bench.peers:
        return []
    forward, leaves = unfused(p, swiglu_prob)
    ours_forward, errors = ours(p, sides.bench.backend), []
    pairs = [(ours_forward(), forward())]
    pairs += zip(
        torch.autograd.grad(pairs[0][0], [p.x_SD, p.w1, p.w2], p.dy_SD),
        torch.autograd.grad(pairs[0][1], leaves, p.dy_SD),
        strict=True,
    )
    for name, (a, b) in zip(("y", "dx", "dw1", "dw2"), pairs, strict=True):
        errors.append((name, error(a.detach(), b.detach().mT if name[:2] == "dw" else b.detach())))
    return [verdict(sides, "check", errors)]


def verdict(sides: Sides, side: str, errors: list[tuple[str, float]], other: str = "") -> Record:
    """Record of relative errors; failed if one is too large or NaN, or if `other` says why."""
    wrong = [f"{name} above {TOLERANCE}" for name, value in errors if not value <= TOLERANCE]
    wrong += [other] if other else []
    note = ", ".join([*(f"{name} {value:.1e}" for name, value in errors), *wrong])
    head = (sides.suite, sides.shape, side, "relative error", "")
    return Record(*head, note=note, failed=bool(wrong))
