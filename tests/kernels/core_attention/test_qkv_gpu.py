"""The kernels that take a mixed projection apart, on a GPU against fp64."""

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels.core_attention.qkv import HeadNorms, queries_keys_values
from phalanx.kernels.core_attention.rope import rope
from tests.kernels.capture import check_replay
from tests.kernels.core_attention.test_qkv import CASES, EPS, Case, exact, given, results, upstream
from tests.kernels.core_attention.test_rope import angles

pytestmark = pytest.mark.gpu

YARN = 0.1 * 3.4657359 + 1  # GPT-OSS: factor 32
MODELS = [
    Case(999, 2, 8, 8, 64, True, False),  # GPT-OSS
    Case(1024, 2, 4, 8, 128, False, True),  # Qwen3
    Case(513, 1, 4, 8, 128, False, False),
    Case(257, 2, 2, 5, 96, True, True),
]


def composed(g, mscale):
    """In torch, part by part, every part rounded."""
    x = g.qkv if g.bias is None else g.qkv + g.bias
    q, k, v = x[..., :-2, :].flatten(2, 3), x[..., -2, :], x[..., -1, :]
    if g.norms is not None:
        q, k = (F.rms_norm(t, w.shape, w, EPS) for t, w in ((q, g.query), (k, g.key)))
    return rope(q, g.freqs, mscale=mscale), rope(k, g.freqs, mscale=mscale), v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", [*CASES, *MODELS], ids=str)
def test_forward_and_backward(case, dtype):
    """Results as near to fp64 as rounding once lets them; sums no farther than torch's are."""
    g = given(case, "cuda", dtype)
    outs, want = queries_keys_values(*g[:2], g.freqs, mscale=YARN, norms=g.norms), exact(g, YARN)
    assert all(o.dtype == dtype and o.is_contiguous() for o in outs)
    ups = upstream(outs)
    leaves = [x.detach().double().requires_grad_() for x in g.leaves]
    filled = iter(leaves)
    wide = [None if x is None else next(filled) for x in g[:4]]
    want = exact(g._replace(**dict(zip(g._fields, wide, strict=False))), YARN)
    wanted = results(want, leaves, ups)
    got = results(outs, g.leaves, ups)
    other = results(composed(g, YARN), g.leaves, ups)
    relative = 2**-8 if dtype == torch.bfloat16 else 2e-5
    for a, b in zip(got[:4], wanted[:4], strict=True):  # q, k, v, dqkv: elements on their own
        scale = b.abs().amax(-1, keepdim=True)  # of a head, whose norm mixes channels
        assert bool(((a.double() - b).abs() <= relative * b.abs() + 1e-5 * scale + 1e-30).all())
    for a, c, b in zip(got, other, wanted, strict=True):
        ours, theirs = (torch.linalg.vector_norm(t.double() - b) for t in (a, c))
        assert ours <= 1.05 * theirs + 1e-6 * torch.linalg.vector_norm(b)


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_the_same_bits_every_time(case):
    g = given(case, "cuda", torch.bfloat16)
    first, second = (
        results(outs, g.leaves, upstream(outs))
        for outs in (
            queries_keys_values(*g[:2], g.freqs, mscale=YARN, norms=g.norms) for _ in range(2)
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_values_that_are_a_view():
    g = given(MODELS[1], "cuda", torch.bfloat16)
    plain, viewed = (
        queries_keys_values(g.qkv, None, g.freqs, norms=g.norms, view=view)
        for view in (False, True)
    )
    assert viewed[2].data_ptr() == g.qkv[..., -1, :].data_ptr()
    ups = upstream(plain)
    both = zip(*(results(outs, g.leaves, ups) for outs in (plain, viewed)), strict=True)
    assert all(torch.equal(a, b) for a, b in both)


def test_strides():
    """A projection cut out of something wider, gradients expanded and with channels apart."""
    torch.manual_seed(0)
    S, B, G, N, d = 65, 2, 3, 4, 64
    freqs = angles(S, d).cuda()
    wide = torch.randn(B, S, G + 2, N, d + 8, device="cuda").bfloat16()
    cut = wide.transpose(0, 1)[:, :, 1:-1, :, 8:]
    weights = [torch.rand(d, device="cuda").bfloat16().requires_grad_() for _ in "qk"]
    found = []
    for x in (cut.detach().requires_grad_(), cut.detach().contiguous().requires_grad_()):
        outs = queries_keys_values(x, None, freqs, norms=HeadNorms(*weights, EPS))
        ups = [
            torch.randn(S, B, 1, d, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
            .bfloat16()
            .expand_as(o)
            for o in outs
        ]
        ups[1] = ups[1].transpose(0, -1).contiguous().transpose(0, -1)
        found.append(results(outs, [x, *weights], ups))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("case", MODELS[:2], ids=str)
def test_graph_capture(case):
    g = given(case, "cuda", torch.bfloat16)
    ups = upstream(queries_keys_values(*g[:2], g.freqs, norms=g.norms))

    def step():
        outs = queries_keys_values(*g[:2], g.freqs, mscale=YARN, norms=g.norms, view=True)
        return results(outs, g.leaves, ups)

    check_replay(step, g.qkv, torch.randn_like(g.qkv))


def test_recompute():
    from torch.utils.checkpoint import checkpoint

    g = given(MODELS[1], "cuda", torch.bfloat16)

    def squares(qkv):
        outs = queries_keys_values(qkv, None, g.freqs, norms=g.norms, view=True)
        return torch.cat([o.square() for o in outs], 2)

    up = torch.randn_like(squares(g.qkv))
    plain = torch.autograd.grad(squares(g.qkv), g.leaves, up)
    again = torch.autograd.grad(checkpoint(squares, g.qkv, use_reentrant=False), g.leaves, up)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
