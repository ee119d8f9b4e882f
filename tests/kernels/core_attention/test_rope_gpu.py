"""The rotary kernel on a GPU against fp64; in bf16 beside Megatron-Core's composition."""

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from phalanx.kernels.core_attention.rope import rope, rope_
from tests.kernels.capture import check_replay
from tests.kernels.core_attention.test_rope import angles, statement

pytestmark = pytest.mark.gpu

YARN = 0.1 * 3.4657359 + 1  # GPT-OSS: factor 32


def composition(x, freqs, mscale, interleaved, first):
    """Megatron-Core's, with the parts that are not turned joined as its attention joins them."""
    F = freqs.shape[-1]
    before, turned, after = x.split([first, F, x.shape[-1] - first - F], -1)
    y = _apply_rotary_pos_emb_bshd(turned, freqs, mla_rotary_interleaved=interleaved, mscale=mscale)
    return torch.cat((before, y, after), -1)


def drawn(*shape, dtype):
    return torch.randn(shape, device="cuda").to(dtype)


def assert_rounded_once(got, exact):
    """fp32 to about an ulp of the operands; bf16 as near to that as bf16 can be."""
    relative = 2**-8 if got.dtype == torch.bfloat16 else 0.0
    assert bool(((got.double() - exact).abs() <= relative * exact.abs() + 4e-6).all())


def assert_at_most_twice(got, other, exact):
    """Errors in the Euclidean and in the largest norm."""
    for p in (2, float("inf")):
        ours, theirs = (torch.linalg.vector_norm(t.double() - exact, p) for t in (got, other))
        assert ours <= 2 * theirs


SHAPES = {  # S, B, H, d, F, mscale, interleaved, first
    "gpt-oss q": (1000, 1, 64, 64, 64, YARN, False, 0),
    "gpt-oss k": (1001, 3, 8, 64, 64, YARN, False, 0),
    "qwen3 q": (512, 2, 32, 128, 128, 1.0, False, 0),
    "qwen3 k": (513, 1, 4, 128, 128, 1.0, False, 0),
    "latent q": (700, 2, 16, 192, 64, 1.0, True, 128),
    "deepseek q": (129, 1, 128, 192, 64, 1.0, True, 128),
    "latent k": (701, 2, 1, 64, 64, 1.0, True, 0),
    "part of a head": (77, 2, 5, 96, 24, 1.2, False, 0),
    "one position": (1, 1, 1, 8, 2, 1.0, True, 3),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_forward_and_backward(shape, dtype):
    S, B, H, d, F, *how = shape
    mscale, interleaved, first = how
    torch.manual_seed(0)
    freqs = angles(S, F, 131.0).cuda()  # to position 131 000
    x, up = (drawn(S, B, H, d, dtype=dtype) for _ in "xu")
    x.requires_grad_()
    y = rope(x, freqs, mscale=mscale, interleaved=interleaved, first=first)
    assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous()
    other, exact = composition(x, freqs, *how), statement(x, freqs, *how)
    grad, other_grad = (torch.autograd.grad(out, x, up)[0] for out in (y, other))
    exact_grad = statement_gradient(up, freqs, *how)
    for got, theirs, want in ((y, other, exact), (grad, other_grad, exact_grad)):
        assert_rounded_once(got, want)
        if dtype == torch.bfloat16:
            assert_at_most_twice(got, theirs, want)
    outside = torch.tensor([*range(first), *range(first + F, d)], dtype=torch.int64, device="cuda")
    assert torch.equal(y[..., outside], x[..., outside])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_in_place(shape, dtype):
    """The bits of `rope`, written over x and over the gradient."""
    S, B, H, d, F, mscale, interleaved, first = shape
    torch.manual_seed(0)
    freqs, how = angles(S, F, 131.0).cuda(), dict(mscale=mscale, interleaved=interleaved)
    leaf, up = (drawn(S, B, H, d, dtype=dtype) for _ in "xu")
    leaf.requires_grad_()
    want = rope(leaf, freqs, **how, first=first)
    (want_grad,) = torch.autograd.grad(want, leaf, up)
    x = leaf.flatten(2) * 1
    y = rope_(x, freqs, heads=H, **how, first=first)
    assert y.data_ptr() == x.data_ptr() and torch.equal(y, want)
    assert "RotateInPlace" in y.grad_fn.next_functions[0][0].name()  # and no CopySlices
    (grad,) = torch.autograd.grad(y, leaf, up)
    assert torch.equal(grad, want_grad) and torch.equal(up, want_grad)


def test_in_place_of_strided_positions_and_an_expanded_gradient():
    torch.manual_seed(0)
    S, B, H, d = 70, 2, 6, 96
    freqs, how = angles(S, 32).cuda(), dict(interleaved=True, first=64)
    wide = drawn(B, S, (H + 1) * d, dtype=torch.bfloat16)
    before = wide.clone()
    x = wide.transpose(0, 1)[..., d:]
    want = rope(x.unflatten(-1, (H, d)), freqs, **how)
    assert torch.equal(rope_(x, freqs, heads=H, **how), want)
    before.transpose(0, 1)[..., d:] = want.flatten(2)
    assert torch.equal(wide, before)
    leaf = drawn(S, B, H * d, dtype=torch.float32).requires_grad_()
    (got,) = torch.autograd.grad(rope_(leaf * 1, freqs, heads=H, **how).sum(), leaf)
    (want,) = torch.autograd.grad(rope(leaf.unflatten(-1, (H, d)), freqs, **how).sum(), leaf)
    assert torch.equal(got, want)


def statement_gradient(up, freqs, *how):
    """fp64, not rounded to the dtype of x as autograd's would be."""
    x = torch.zeros(up.shape, dtype=torch.float64, device=up.device, requires_grad=True)
    return torch.autograd.grad(statement(x, freqs, *how), x, up.double())[0]


def test_strides():
    """Heads cut out of something wider, gradients as attention lays them out."""
    torch.manual_seed(0)
    S, B, H, d = 65, 2, 6, 64
    freqs = angles(S, d).cuda()
    wide = drawn(B, S, H + 2, d + 8, dtype=torch.bfloat16)
    x = wide.transpose(0, 1)[:, :, 1:-1, 8:].requires_grad_()
    up = drawn(B, H, S, d, dtype=torch.bfloat16).permute(2, 0, 1, 3)
    results = []
    for given in (x, x.detach().contiguous().requires_grad_()):
        y = rope(given, freqs)
        results.append((y, torch.autograd.grad(y, given, up)[0]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    spread = drawn(S, B, H, d, 2, dtype=torch.bfloat16)[..., 0]  # channels apart: copied first
    assert torch.equal(rope(spread, freqs), rope(spread.contiguous(), freqs))


def test_graph_capture():
    torch.manual_seed(0)
    S, B, H, d = 130, 1, 8, 64
    freqs, of_half = angles(S, d).cuda(), angles(S, d // 2).cuda()
    x, up = (drawn(S, B, H, d, dtype=torch.bfloat16) for _ in "xu")
    x.requires_grad_()

    def step():
        y = rope(rope(x, freqs, mscale=YARN), of_half, interleaved=True, first=32)
        return [y, *torch.autograd.grad(y, x, up)]

    check_replay(step, x, drawn(*x.shape, dtype=torch.bfloat16))


def test_recompute():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    freqs = angles(40, 64).cuda()
    x = drawn(40, 2, 4, 64, dtype=torch.bfloat16).requires_grad_()

    def square(t):
        return rope(t, freqs, mscale=YARN).square()

    up = drawn(40, 2, 4, 64, dtype=torch.bfloat16)
    plain = torch.autograd.grad(square(x), x, up)[0]
    again = torch.autograd.grad(checkpoint(square, x, use_reentrant=False), x, up)[0]
    assert torch.equal(plain, again)
