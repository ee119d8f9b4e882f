"""The custom ops under torch's own checks, in fake tensors, and compiled as one graph."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.functional import custom_ops
from phalanx.kernels.functional.layouts import LAYOUTS
from phalanx.kernels.functional.module import GroupedMLP
from phalanx.kernels.routing import plan
from tests.kernels.compiling import compiling
from tests.kernels.problems import Problem, leaves_of, make

ACT = Activation("quick_geglu", limit=0.7, offset=1.0)
BACKENDS = ["reference", "torch"]


def arguments(p: Problem, backend: str, layout: str = "halves") -> list:
    leaves, stored = leaves_of(p), LAYOUTS[layout]
    tensors = [leaves.get(name) for name in ("w1", "w2", "b1", "b2")]
    for i, name in enumerate(("w1", "w2", "b1", "b2")):
        if tensors[i] is not None:
            there = stored.from_kernels(tensors[i].detach(), fc1=name.endswith("1"))
            tensors[i] = there.requires_grad_()
    plan = [p.index, leaves["prob"], p.offsets, p.inverse, None]
    return [leaves["x"], *tensors, *plan, custom_ops.encode(MLPSpec(p.act, backend), layout), True]


@pytest.mark.parametrize("layout", ["halves", "transposed_interleaved"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_expert_ops(backend: str, bias: bool, layout: str) -> None:
    given = arguments(make(ACT, torch.float32, bias=bias), backend, layout)
    torch.library.opcheck(custom_ops.grouped_mlp.overload, tuple(given))
    given = [t.detach() if isinstance(t, Tensor) else t for t in given]
    out, h = custom_ops.grouped_mlp(*given)
    for needs in ([True, True, True, bias, bias], [True] + [False] * 4):
        torch.library.opcheck(
            custom_ops.grouped_mlp_backward.overload,
            (torch.ones_like(out), *given[:3], given[4], h, *given[5:11], needs),
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_plan(backend: str) -> None:
    idx, prob = torch.randint(-1, 8, (40, 3)).int(), torch.rand(40, 3, requires_grad=True)
    torch.library.opcheck(plan.plan.overload, (idx, prob, 2, 4, 64, backend))
    made = plan.make_plan(idx, prob, first_expert=2, local_experts=4, rows=64, backend=backend)
    given = (torch.randn(64), made.inverse_NK, backend)
    torch.library.opcheck(plan.plan_backward.overload, given)


@pytest.mark.parametrize("backend", ["reference", "torch", "fused"])
def test_fake_tensors_have_the_shapes(backend: str) -> None:
    """For any backend, also one that cannot run here."""
    p = make(ACT, torch.bfloat16, rows=256)
    given = arguments(p, backend)
    with FakeTensorMode() as mode:
        x, w1, w2, *rest = (mode.from_tensor(t) if isinstance(t, Tensor) else t for t in given)
        out, h = custom_ops.grouped_mlp(x, w1, w2, *rest)
        assert (out.shape, out.dtype) == (p.x.shape, torch.bfloat16)
        assert h.shape == (256, p.w1.shape[1])
        leaves = [x, w1, w2, rest[0], rest[1], rest[3]]
        for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
            assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        idx = torch.zeros(40, 3, dtype=torch.int32)
        made = plan.make_plan(
            idx, torch.rand(40, 3), first_expert=0, local_experts=4, rows=64, backend=backend
        )
        assert made.row_prob_S.shape == (64,) and made.inverse_NK.shape == (40, 3)


@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_as_one_graph(autocast: bool) -> None:
    m = GroupedMLP(experts=4, hidden=32, ffn=24, top_k=2)
    x, idx = torch.randn(9, 32, requires_grad=True), torch.randint(0, 4, (9, 2))
    prob = torch.rand(9, 2, requires_grad=True)
    leaves = [x, prob, *m.parameters()]
    with compiling(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        whole = torch.compile(m, fullgraph=True, backend="aot_eager")
        out = [f(x, idx, prob) for f in (whole, m)]
    assert all(o.dtype == (torch.bfloat16 if autocast else torch.float32) for o in out)
    got, want = (torch.autograd.grad(o.float().square().sum(), leaves) for o in out)
    for ours, eager in zip(got, want, strict=True):
        torch.testing.assert_close(ours, eager)
