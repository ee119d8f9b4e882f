"""The operations of a backend by themselves: what they gather, where they write, what they keep."""

import itertools

import pytest
import torch

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer
from tests.kernels.problems import make

BACKENDS = ["reference", "torch"]
CLAMPED = Activation("quick_geglu", alpha=1.702, limit=0.7, offset=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_gradient_keeps_all_bits_of_prob(backend):
    """Terms that nearly cancel leave what a probability rounded to bf16 would have lost."""
    prob = torch.tensor([0.7, 0.7 + 2**-13, 0.3, 0.3 + 2**-20])
    d = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].repeat(1, 8).bfloat16()
    index = torch.zeros(4).int()
    plan = ExpertPlan(index, prob, torch.tensor([0, 2, 4]).int(), index[:1, None])
    got = provider(backend).bias_grad(BiasGradCall(Operand(d), plan, scale=True))
    assert got.dtype == torch.float32
    assert torch.equal(got, (prob[::2] - prob[1::2])[:, None].expand(2, 8))


def _plan(p):
    return ExpertPlan(p.index, p.prob, p.offsets, p.inverse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gathering_inside_is_gathering_before(backend):
    """Each operation that takes rows of tokens, with an index that is garbage in the padding."""
    p, ops = make(CLAMPED, torch.bfloat16, rows=256), provider(backend)
    used = int(p.offsets[-1])
    dout, v = torch.randn_like(p.x), torch.randn(256, 24).bfloat16()
    index = p.index.clone()
    index[used:] = 2**30
    expanded = dout.index_select(0, p.index)
    plan, fc2 = _plan(p)._replace(row_index_S=index), Linear(p.w2, p.b2)
    before, inside, other = Operand(expanded), Operand(dout, gather=True), Operand(v)
    h, _ = ops.fc1_act(Fc1Call(p.x, Linear(p.w1, p.b1), plan, p.act))
    made, want = (
        ops.fc2_dgrad_dact(Fc2DgradCall(dy, fc2, h, plan, p.act)) for dy in (inside, before)
    )
    for ours, expected in zip(made[:3], want[:3], strict=True):
        assert torch.equal(ours[:used], expected[:used])
    for made, want in (((inside, other), (before, other)), ((other, inside), (other, before))):
        assert torch.equal(ops.wgrad(WgradCall(*made, plan)), ops.wgrad(WgradCall(*want, plan)))
    for scale in (False, True):
        db = ops.bias_grad(BiasGradCall(before, plan, scale))
        assert torch.equal(ops.bias_grad(BiasGradCall(inside, plan, scale)), db)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradients_go_where_they_are_sent(backend):
    p, ops = make(CLAMPED, torch.bfloat16, choice=[[-1, 2]] * 30), provider(backend)
    d, v = (Operand(torch.randn(len(p.index), n).bfloat16()) for n in (32, 24))
    call = WgradCall(d, v, _plan(p))
    fresh = ops.wgrad(call)
    assert fresh.dtype == torch.bfloat16
    out = torch.full((4, 32, 24), 3.0)
    assert ops.wgrad(call._replace(into=Buffer(out, add=False))) is out
    assert torch.equal(out.bfloat16(), fresh)
    ops.wgrad(call._replace(into=Buffer(out, add=True)))
    torch.testing.assert_close(out, 2 * fresh.float(), rtol=2**-7, atol=0)
    assert not out[[0, 1, 3]].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("add", [False, True])
def test_weight_gradients_of_two_micro_batches(backend, add):
    """Each has rows, an index and experts without rows of its own."""
    choices = [[-1, 2], [0, 2]] * 15, [[3, 2], [3, -1], [3, 2]] * 10
    ops, calls, wanted = provider(backend), [], torch.zeros(4, 32, 24, dtype=torch.float64)
    for choice in choices:
        p = make(CLAMPED, torch.bfloat16, choice=choice)
        S, plan = len(p.index), _plan(p)
        d, v = torch.randn(len(p.x), 32).bfloat16(), torch.randn(S, 24).bfloat16()
        calls.append(WgradCall(Operand(d, gather=True), Operand(v), plan))
        for e, (begin, end) in enumerate(itertools.pairwise(plan.offsets.tolist())):
            rows = plan.row_index_S[begin:end].long()
            wanted[e] += d[rows].double().T @ v[begin:end].double()
    out = torch.full((4, 32, 24), 3.0)
    first = calls[0]._replace(into=Buffer(out, add))
    assert ops.wgrad_pair(first, calls[1]) is out
    wanted += 3 if add else 0
    assert wanted.norm(dim=(1, 2)).count_nonzero() == (4 if add else 3)
    # `torch` rounds the gradient of a micro-batch to bf16
    torch.testing.assert_close(out.double(), wanted, rtol=2**-7, atol=2**-4)
    if backend == "reference":
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
