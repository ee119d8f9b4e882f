"""Rotary embedding: against complex numbers in fp64, and the kernel run by an interpreter."""

import pytest
import torch
from torch import Tensor

from phalanx.kernels.core_attention.rope import rope
from tests.kernels.interpreter import interpret


def angles(S: int, F: int, apart: float = 1.0) -> Tensor:
    """[S, 1, 1, F] of positions 0, apart, 2 * apart, ..."""
    inverse = 1e4 ** -(torch.arange(0, F, 2) / F)
    half = torch.outer(apart * torch.arange(S), inverse)
    return torch.cat((half, half), -1)[:, None, None]


def statement(x: Tensor, freqs: Tensor, mscale: float, interleaved: bool, first: int) -> Tensor:
    """Channel pairs as complex numbers, times mscale * exp(i angle); fp64."""
    F, x = freqs.shape[-1], x.double()
    before, turned, after = x.split([first, F, x.shape[-1] - first - F], -1)
    parts = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    angle = freqs[..., : F // 2].double()
    y = torch.complex(*parts) * torch.polar(torch.full_like(angle, mscale), angle)
    return torch.cat((before, y.real, y.imag, after), -1)


CASES = [
    # S, B, H, d, F, mscale, interleaved, first
    (5, 2, 8, 16, 16, 1.35, False, 0),
    (33, 1, 3, 24, 24, 1.0, False, 0),
    (4, 2, 3, 24, 8, 1.0, True, 16),
    (70, 1, 1, 8, 8, 1.2, True, 0),
    (3, 2, 5, 20, 12, 1.0, False, 0),
    (3, 1, 2, 20, 6, 1.0, False, 7),
]


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case) -> None:
    S, B, H, d, F, mscale, interleaved, first = case
    torch.manual_seed(0)
    freqs, x = angles(S, F, 13.0), torch.randn(S, B, H, d, requires_grad=True)
    y = rope(x, freqs, mscale=mscale, interleaved=interleaved, first=first)
    want = statement(x, freqs, mscale, interleaved, first)
    torch.testing.assert_close(y.double(), want, rtol=0, atol=2e-6)
    up = torch.randn_like(y)
    got, expected = (torch.autograd.grad(out, x, up.to(out.dtype))[0] for out in (y, want))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "wrong",
    [angles(4, 8), angles(5, 10), angles(5, 8).double(), angles(5, 8).expand(5, 2, 1, 8)],
    ids=["positions", "channels", "dtype", "per sequence"],
)
def test_angles_that_do_not_fit(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="rotary angles"):
        rope(torch.zeros(5, 2, 3, 8), wrong)


def interpreted() -> None:
    """In a process of its own, where Triton interprets kernels on CPU tensors.

    Its interpreter has no FMA, which costs angles two digits, and truncates to bf16: fp32 then, and
    the bounds of tests on a GPU are tighter.
    """
    from phalanx.kernels.core_attention.rope import RotateInPlace, rotate_op

    torch.manual_seed(0)
    close = dict(rtol=0, atol=2e-5)
    for S, B, H, d, F, mscale, interleaved, first in CASES:
        freqs = angles(S, F)
        x = torch.randn(B, S, H + 1, d + 3).transpose(0, 1)[:, :, 1:, 2:-1].requires_grad_()
        up = torch.randn(S, H, B, d).transpose(1, 2)
        y = rotate_op(x, freqs, mscale, interleaved, first, False)
        want = statement(x, freqs, mscale, interleaved, first)
        torch.testing.assert_close(y.double(), want, **close)
        got, expected = (torch.autograd.grad(out, x, up.to(out.dtype))[0] for out in (y, want))
        torch.testing.assert_close(got, expected, **close)
        made = x.flatten(2) * 1
        again = RotateInPlace.apply(made, freqs, H, mscale, interleaved, first)
        again = again.view(y.shape)
        assert again.data_ptr() == made.data_ptr() and torch.equal(again, y)
        assert torch.equal(torch.autograd.grad(again, x, up.clone())[0], got)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (x.detach().requires_grad_(), angles(3, 6), 1.0, False, 7, False)
    torch.library.opcheck(rotate_op.overload, args, test_utils=checks)


def test_kernel_interpreted() -> None:
    interpret(__name__)
