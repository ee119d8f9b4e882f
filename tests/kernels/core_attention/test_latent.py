"""Keys and values of latent attention: against fp64, and the kernels run by an interpreter."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.core_attention.latent import KeysValues, keys_values
from tests.kernels.core_attention.test_rope import angles, statement
from tests.kernels.interpreter import interpret

CASES = [
    # S, B, H, n, F, v, mscale
    (5, 2, 8, 16, 8, 16, 1.0),
    (33, 1, 3, 24, 10, 12, 1.35),
    (70, 2, 1, 8, 8, 5, 1.2),
    (3, 1, 5, 1030, 2, 3, 1.0),
]


def drawn(S: int, B: int, H: int, n: int, F: int, v: int) -> tuple[list[Tensor], list[Tensor]]:
    """Up-projection and shared part, cut out of something wider; gradients of keys and values as
    attention lays them out.
    """
    kv = torch.randn(B, S, H + 1, n + v + 2).transpose(0, 1)[:, :, 1:, 1:-1]
    shared = torch.randn(S, B, F + 7)[..., 7:]
    ups = [torch.randn(B, H, S, width).permute(2, 0, 1, 3) for width in (n + F, v)]
    return [kv.requires_grad_(), shared.requires_grad_()], ups


def stated(
    kv: Tensor, shared: Tensor, freqs: Tensor, nope: int, mscale: float
) -> tuple[Tensor, Tensor]:
    """fp64; nothing is rounded."""
    turned = statement(shared[:, :, None], freqs, mscale, True, 0)
    own, value = kv.double().split([nope, kv.shape[-1] - nope], -1)
    return torch.cat((own, turned.expand(-1, -1, kv.shape[2], -1)), -1), value


def stated_gradients(
    kv: Tensor, shared: Tensor, freqs: Tensor, nope: int, mscale: float, ups: list[Tensor]
) -> tuple[Tensor, ...]:
    """fp64, not rounded to the dtype of the operands as autograd's would be."""
    leaves = [x.detach().double().requires_grad_() for x in (kv, shared)]
    outs = stated(*leaves, freqs, nope, mscale)
    return torch.autograd.grad(outs, leaves, [up.double() for up in ups])


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    *shape, mscale = case
    S, _, _, n, F, _ = shape
    leaves, ups = drawn(*shape)
    freqs = angles(S, F, 13.0)
    outs = keys_values(*leaves, freqs, nope=n, mscale=mscale)
    for got, want in zip(outs, stated(*leaves, freqs, n, mscale), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)
    grads = torch.autograd.grad(outs, leaves, ups)
    for got, want in zip(grads, stated_gradients(*leaves, freqs, n, mscale, ups), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shared", "freqs", "nope", "message"),
    [
        (torch.zeros(5, 2, 4), angles(4, 4), 6, "rotary angles"),
        (torch.zeros(5, 2, 4), angles(5, 2), 6, "do not fit"),
        (torch.zeros(5, 1, 4), angles(5, 4), 6, "do not fit"),
        (torch.zeros(5, 2, 4), angles(5, 4), 9, "do not fit"),
        (torch.zeros(5, 2, 4).bfloat16(), angles(5, 4), 6, "bfloat16"),
    ],
    ids=["positions", "channels", "batch", "keys", "dtype"],
)
def test_what_does_not_fit(shared: Tensor, freqs: Tensor, nope: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        keys_values(torch.zeros(5, 2, 3, 9), shared, freqs, nope=nope)


def interpreted() -> None:
    """In fp32, as Triton's interpreter truncates to bf16; it has no FMA, which costs angles two
    digits.
    """
    torch.manual_seed(0)
    for *shape, mscale in CASES:
        S, _, _, n, F, _ = shape
        leaves, ups = drawn(*shape)
        freqs = angles(S, F)
        outs = KeysValues.apply(*leaves, freqs, n, mscale)
        assert all(out.is_contiguous() and not out._is_view() for out in outs)
        for got, want in zip(outs, stated(*leaves, freqs, n, mscale), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)
        grads = torch.autograd.grad(outs, leaves, ups, retain_graph=True)
        wants = stated_gradients(*leaves, freqs, n, mscale, ups)
        for got, want in zip(grads, wants, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=0, atol=5e-5)
        own, _ = torch.autograd.grad(outs[:1], leaves, ups[:1])  # values that nobody reads
        assert torch.equal(own[..., :n], ups[0][..., :n]) and not own[..., n:].any()


def test_kernels_interpreted() -> None:
    interpret(__name__)
