"""The kernels of latent attention's keys on a GPU: forward the bits of torch's composition on the
rotary kernel, backward against fp64, which is rounded once.
"""

import pytest
import torch

from phalanx.kernels.core_attention.latent import keys_values
from phalanx.kernels.core_attention.rope import rope
from tests.kernels.capture import check_replay
from tests.kernels.core_attention.test_latent import stated, stated_gradients
from tests.kernels.core_attention.test_rope import angles

pytestmark = pytest.mark.gpu

SHAPES = {  # S, B, H, n, F, v, mscale
    "moonlight": (700, 2, 16, 128, 64, 128, 1.0),
    "deepseek": (129, 1, 128, 128, 64, 128, 1.37),
    "odd": (77, 3, 5, 40, 24, 20, 1.2),
    "one position": (1, 1, 1, 8, 2, 4, 1.0),
}


def drawn(S, B, H, n, F, v, dtype):
    kv, shared = (
        torch.randn(s, device="cuda").to(dtype) for s in ((S, B, H, n + v), (S, B, F + 8))
    )
    ups = [torch.randn(B, H, S, c, device="cuda").to(dtype).permute(2, 0, 1, 3) for c in (n + F, v)]
    return [kv.requires_grad_(), shared[..., 8:].requires_grad_()], ups


def composition(kv, shared, freqs, nope, mscale):
    turned = rope(shared.unsqueeze(2), freqs, mscale=mscale, interleaved=True)
    own, value = kv.split([nope, kv.shape[-1] - nope], -1)
    return torch.cat((own, turned.expand(-1, -1, kv.shape[2], -1)), -1), value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_forward_and_backward(shape, dtype):
    torch.manual_seed(0)
    *sizes, mscale = shape
    S, _, H, n, F, _ = sizes
    leaves, ups = drawn(*sizes, dtype)
    freqs = angles(S, F, 131.0).cuda()
    outs = keys_values(*leaves, freqs, nope=n, mscale=mscale)
    for got, want in zip(outs, composition(*leaves, freqs, n, mscale), strict=True):
        assert torch.equal(got, want)
    assert_rounded_once(outs[0], stated(*leaves, freqs, n, mscale)[0], 1)
    grads = torch.autograd.grad(outs, leaves, ups)
    wants = stated_gradients(*leaves, freqs, n, mscale, ups)
    assert torch.equal(grads[0].double(), wants[0])
    assert_rounded_once(grads[1], wants[1], H)


def assert_rounded_once(got, exact, terms):
    """fp32 of a sum of so many terms around 1; bf16 as near to that as bf16 can be."""
    relative = 2**-8 if got.dtype == torch.bfloat16 else 0.0
    assert bool(((got.double() - exact).abs() <= relative * exact.abs() + 4e-6 * terms).all())


def test_graph_capture():
    torch.manual_seed(0)
    leaves, ups = drawn(130, 1, 8, 64, 32, 64, torch.bfloat16)
    freqs = angles(130, 32).cuda()

    def step():
        outs = keys_values(*leaves, freqs, nope=64)
        return [*(out.clone() for out in outs), *torch.autograd.grad(outs, leaves, ups)]

    check_replay(step, leaves[0], torch.randn_like(leaves[0]))


def test_recompute():
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    leaves, _ = drawn(40, 2, 4, 64, 32, 64, torch.bfloat16)
    freqs = angles(40, 32).cuda()

    def norm(kv, shared):
        return sum(out.float().square().sum() for out in keys_values(kv, shared, freqs, nope=64))

    plain = torch.autograd.grad(norm(*leaves), leaves)
    again = torch.autograd.grad(checkpoint(norm, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
