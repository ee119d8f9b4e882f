"""The custom ops under torch's own checks, in fake tensors, and compiled as one graph."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import ops, plan
from kernels.activation import Activation
from kernels.grouped_mlp import dense_mlp
from tests.kernels.problems import Problem, forward, leaves_of, make

ACT = Activation("quick_geglu", limit=0.7, offset=1.0)
BACKENDS = ["reference", "torch"]


def arguments(p: Problem, backend: str, summed: bool) -> list:
    leaves = leaves_of(p)
    tensors = [leaves.get(name) for name in ("x", "w1", "w2", "b1", "b2")]
    plan = [p.index, leaves["prob"], p.offsets, p.inverse, None]
    how = [p.act.kind, [p.act.alpha, p.act.limit, p.act.offset], backend, [0, 0, 0], True]
    return [*tensors, *plan, *how, summed, True, False]


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_expert_ops(backend: str, bias: bool, summed: bool) -> None:
    given = arguments(make(ACT, torch.float32, bias=bias), backend, summed)
    torch.library.opcheck(ops.grouped_mlp, tuple(given))
    given = [t.detach() if isinstance(t, Tensor) else t for t in given]
    out, h = ops.grouped_mlp(*given)
    for needs in ([True, True, True, bias, bias], [True] + [False] * 4):
        torch.library.opcheck(
            ops.grouped_mlp_backward,
            (torch.ones_like(out), *given[:3], given[4], h, *given[5:16], needs),
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_dense_op(backend: str) -> None:
    x, w1 = torch.randn(9, 8, requires_grad=True), torch.randn(24, 8, requires_grad=True)
    w2, offsets = torch.randn(8, 12, requires_grad=True), torch.tensor([0, 9]).int()
    how = ["swiglu", [1.7, 0.0, 0.0], backend, [0, 0, 0], True, False, True, False]
    torch.library.opcheck(
        ops.grouped_mlp, (x, w1, w2, None, None, None, None, offsets, None, None, *how)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_combine_and_plan(backend: str) -> None:
    p = make(ACT, torch.float32)
    y = torch.randn(len(p.index), 32, requires_grad=True)
    torch.library.opcheck(ops.combine, (y, p.index, p.offsets, p.inverse, backend))
    idx, prob = torch.randint(-1, 8, (40, 3)).int(), torch.rand(40, 3, requires_grad=True)
    torch.library.opcheck(plan.plan, (idx, prob, 2, 4, 64, backend))
    made = plan.make_plan(idx, prob, first_expert=2, local_experts=4, rows=64, backend=backend)
    given = (torch.randn(64), made.inverse_NK, backend)
    torch.library.opcheck(plan.plan_backward, given)


@pytest.mark.parametrize("backend", ["reference", "torch", "fused"])
@pytest.mark.parametrize("split", [False, True])
def test_fake_tensors_have_the_shapes(backend: str, split: bool) -> None:
    """For any backend, also one that cannot run here."""
    p = make(ACT, torch.bfloat16, rows=256)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = Problem(*(mode.from_tensor(t) if isinstance(t, Tensor) else t for t in _fields(p)))
        leaves = leaves_of(fake)
        out = forward(fake, leaves, backend, split=split)
        grads = torch.autograd.grad(out, list(leaves.values()), fake.dout)
        assert out.shape == p.x.shape and out.dtype == torch.bfloat16
        for leaf, grad in zip(leaves.values(), grads, strict=True):
            assert (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        idx = torch.zeros(40, 3, dtype=torch.int32)
        made = plan.make_plan(
            idx, torch.rand(40, 3), first_expert=0, local_experts=4, rows=64, backend=backend
        )
        assert made.row_prob_S.shape == (64,) and made.inverse_NK.shape == (40, 3)
        w1, w2 = torch.rand(48, 32), torch.rand(32, 24)
        x = torch.rand(2, 5, 32)
        assert dense_mlp(x, w1, w2, activation=ACT, backend=backend).shape == x.shape


def _fields(p: Problem) -> list:
    return [getattr(p, name) for name in p.__dataclass_fields__]


_COMPILED = """
import torch
from kernels.activation import Activation
from tests.kernels.problems import dense, error, forward, gradients, leaves_of, make
p = make(Activation("swiglu"), torch.float32, rows=128)
leaves = leaves_of(p)
whole = torch.compile(lambda **l: forward(p, l, "torch"), fullgraph=True, backend="aot_eager")
got, exact = gradients(whole(**leaves), p.dout, leaves), dense(p)
assert all(error(got[name], exact[name]) < 1e-6 for name in exact)
"""


def test_compiles_as_one_graph() -> None:
    env = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
