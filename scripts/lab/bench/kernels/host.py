"""Suite `host`: host time of a call, on a problem so small that the GPU keeps up.

Calls run in a loop without synchronization; the GPU finishes each before the next is launched,
so the launch queue never fills. A shape is tokens, hidden, expert width, experts and top-k.
"""

import time
from collections.abc import Callable

import torch

from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import PlanSize
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec, MLPWeights
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.sm90.routing.topk import topk, topk_backward
from phalanx.scripts.lab.bench.kernels.layer import (
    ROUTING,
    Layer,
    composed,
    leaves_of,
    split_gate_up,
)
from phalanx.scripts.lab.bench.problems import SWIGLU
from phalanx.scripts.lab.bench.records import Record
from phalanx.scripts.lab.bench.shapes import Shape
from phalanx.scripts.lab.bench.timing import Bench, reason, time_of

_CALLS, _WARM_CALLS = 100, 10


def calls(bench: Bench, shape: Shape) -> dict[str, Callable[[], object]]:
    """Every operation of the layer, then passes of the whole layer."""
    leaves, dout = leaves_of(shape, bench.clock.device)
    leaves[2] = split_gate_up(leaves[2].detach()).requires_grad_()
    x, router, w1, w2 = (leaf.detach() for leaf in leaves)
    K, ops = shape[4], provider(bench.backend)
    size = PlanSize(0, shape[3], shape[0] * K)
    logits = x @ router.T
    idx, prob = topk(logits, top_k=K, **ROUTING)
    plan, fc1, fc2 = ops.plan(idx, prob, size), Linear(w1), Linear(w2)
    h, a = ops.fc1_act(Fc1Call(x, fc1, plan, SWIGLU))
    y, end_offsets = ops.rows(RowsCall(a, fc2, plan)), plan.offsets[1:].clone()
    row_prob, inverse = plan.row_prob_S, plan.inverse_NK
    assert h is not None and row_prob is not None and inverse is not None
    spec = MLPSpec(SWIGLU, bench.backend)

    def composed_mlp() -> torch.Tensor:
        return grouped_mlp(leaves[0], MLPWeights(*leaves[2:]), plan, spec)

    def fused() -> torch.Tensor:
        return Layer.apply(*leaves, K, ops)

    def both(
        forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor]
    ) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), leaves, dout)

    return {
        "topk": lambda: topk(logits, top_k=K, **ROUTING),
        "plan": lambda: ops.plan(idx, prob, size),
        "fc1_act": lambda: ops.fc1_act(Fc1Call(x, fc1, plan, SWIGLU)),
        "rows": lambda: ops.rows(RowsCall(a, fc2, plan)),
        "combine": lambda: ops.combine(y, inverse),
        "fc2_dgrad_dact + dprob": lambda: ops.fc2_dgrad_dact(
            Fc2DgradCall(Operand(dout, gather=True), fc2, h, plan, SWIGLU)
        ),
        "wgrad": lambda: ops.wgrad(WgradCall(Operand(h), Operand(x, gather=True), plan)),
        "bias_grad": lambda: ops.bias_grad(BiasGradCall(Operand(h), plan, scale=False)),
        "plan_backward": lambda: ops.plan_backward(row_prob, inverse),
        "topk_backward": lambda: topk_backward(prob, idx, prob, logits, **ROUTING),
        "make_plan": lambda: make_plan(idx, prob, **size._asdict(), backend=bench.backend),
        "torch._grouped_mm": lambda: torch._grouped_mm(a, w2.mT, offs=end_offsets),
        "grouped_mlp": composed_mlp,
        "grouped_mlp, both": both(composed_mlp, [leaves[0], *leaves[2:]]),
        "layer": fused,
        "layer, both": both(fused, leaves),
        "layer, public": lambda: composed(leaves, K, bench.backend),
        "layer, public, both": both(lambda: composed(leaves, K, bench.backend), leaves),
    }


def suite(bench: Bench, shape: Shape) -> list[Record]:
    records = []
    for name, call in calls(bench, shape).items():
        key = ("host", shape, "ours" if name[:5] != "torch" else "torch", name, "host")
        try:
            records.append(Record(*key, *time_of(_milliseconds(bench, call))))
        except Exception as why:
            records.append(Record(*key, note=reason(why), failed=True))
    return records


def _milliseconds(bench: Bench, call: Callable[[], object]) -> list[float]:
    times = []
    for _ in range(_WARM_CALLS):
        call()
    for _ in range(bench.rounds):
        bench.clock.wait()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter() - begin) * 1000 / _CALLS)
    bench.clock.wait()
    return times
