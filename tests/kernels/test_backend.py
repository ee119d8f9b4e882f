"""The operations of a backend by themselves: what they gather, where they write, what they keep."""

import pytest
import torch

from kernels.activation import Activation
from kernels.backend import Rows
from kernels.providers import provider
from tests.kernels.problems import make

BACKENDS = ["reference", "torch"]
CLAMPED = Activation("quick_geglu", alpha=1.702, limit=0.7, offset=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bias_gradient_keeps_all_bits_of_prob(backend):
    """Terms that nearly cancel leave what a probability rounded to bf16 would have lost."""
    prob = torch.tensor([0.7, 0.7 + 2**-13, 0.3, 0.3 + 2**-20])
    d = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None].repeat(1, 8).bfloat16()
    index = torch.zeros(4).int()
    rows = Rows(index, prob, torch.tensor([0, 2, 4]).int(), index[:1, None])
    got = provider(backend).bias_grad(d, rows, scale=True, gather=False)
    assert got.dtype == torch.float32
    assert torch.equal(got, (prob[::2] - prob[1::2])[:, None].expand(2, 8))


def _rows(p):
    return Rows(p.index, p.prob, p.offsets, p.inverse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gathering_inside_is_gathering_before(backend):
    """Each operation that takes rows of tokens, with an index that is garbage in the padding."""
    p, ops = make(CLAMPED, torch.bfloat16, rows=256), provider(backend)
    used = int(p.offsets[-1])
    dout, v = torch.randn_like(p.x), torch.randn(256, 24).bfloat16()
    index = p.index.clone()
    index[used:] = 2**30
    expanded = dout.index_select(0, p.index)
    rows = _rows(p)._replace(index_S=index)
    h, _ = ops.fc1_act(p.x, p.w1, p.b1, rows, p.act)
    inside = ops.fc2_dgrad_dact(dout, p.w2, p.b2, h, rows, p.act, gather=True)
    before = ops.fc2_dgrad_dact(expanded, p.w2, p.b2, h, rows, p.act, gather=False)
    for ours, expected in zip(inside[:3], before[:3], strict=True):
        assert torch.equal(ours[:used], expected[:used])
    both = dict(gather_d=False, gather_v=False)
    dw = ops.wgrad(expanded, v, rows, **both)
    assert torch.equal(ops.wgrad(dout, v, rows, gather_d=True, gather_v=False), dw)
    dw = ops.wgrad(v, expanded, rows, **both)
    assert torch.equal(ops.wgrad(v, dout, rows, gather_d=False, gather_v=True), dw)
    for scale in (False, True):
        db = ops.bias_grad(expanded, rows, scale=scale, gather=False)
        assert torch.equal(ops.bias_grad(dout, rows, scale=scale, gather=True), db)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradients_go_where_they_are_sent(backend):
    p, ops = make(CLAMPED, torch.bfloat16, choice=[[-1, 2]] * 30), provider(backend)
    rows, both = _rows(p), dict(gather_d=False, gather_v=False)
    d, v = torch.randn(len(p.index), 32).bfloat16(), torch.randn(len(p.index), 24).bfloat16()
    fresh = ops.wgrad(d, v, rows, **both)
    assert fresh.dtype == torch.bfloat16
    out = torch.full((4, 32, 24), 3.0)
    assert ops.wgrad(d, v, rows, **both, out=out) is out
    assert torch.equal(out.bfloat16(), fresh)
    ops.wgrad(d, v, rows, **both, out=out, accumulate=True)
    torch.testing.assert_close(out, 2 * fresh.float(), rtol=2**-7, atol=0)
    assert not out[[0, 1, 3]].any()
