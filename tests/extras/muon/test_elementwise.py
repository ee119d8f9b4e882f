"""Muon's momentum and move against fp64, and the kernels' code in an interpreter."""

import pytest
import torch
from torch import Tensor

from phalanx.extras.muon.elementwise import momentum, move_
from phalanx.kernels.elementwise.adam import merged
from tests.kernels.elementwise.test_adam import FP32, assert_rounded_once, halves
from tests.kernels.interpreter import interpret

DTYPES = (torch.float32, torch.bfloat16)


def drawn(n: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameter, gradient, momentum and update, fp32."""
    g = torch.Generator().manual_seed(n)
    p, grad, mean, update = (torch.randn(n, generator=g).to(device) for _ in range(4))
    return p, 0.1 * grad, 0.1 * mean, update


def assert_momentum(
    n: int, grad: torch.dtype, buffer: torch.dtype, nesterov: bool, device: str
) -> None:
    g, mean = (t.to(d) for t, d in zip(drawn(n, device)[1:3], (grad, buffer), strict=True))
    before, kept = g.clone(), mean.double()
    found = momentum(g, mean, keep=0.95, nesterov=nesterov, clip_coef=0.3)
    assert torch.equal(g, before) and found.dtype == torch.float32
    clipped = g.double() * 0.3
    want = 0.95 * kept + 0.05 * clipped
    terms = 0.95 * kept.abs() + 0.05 * clipped.abs()
    if buffer == torch.bfloat16:
        assert_rounded_once(mean, want, terms)
    else:
        assert bool(((mean.double() - want).abs() <= 6 * FP32 * terms).all())
    if nesterov:
        want, terms = 0.95 * want + 0.05 * clipped, terms + clipped.abs()
    assert bool(((found.double() - want).abs() <= 8 * FP32 * terms).all())
    fresh = drawn(n, device)[2].to(buffer)
    how = dict(keep=0.95, nesterov=nesterov, clip_coef=0.3)
    rounded = momentum(g, fresh, **how, dtype=torch.bfloat16)
    torch.testing.assert_close(rounded.float(), found, rtol=1.01 * 2**-8, atol=0)


def assert_moved(n: int, device: str, dtype: torch.dtype = torch.float32) -> None:
    """Nothing but fp32 on the way; halves as the whole, bit for bit."""
    p, *_, update = drawn(n, device)
    update = update.to(dtype)
    weight, remainder = halves(p)
    want, sizes = 0.9 * p.double() - 0.02 * update.double(), p.abs() + update.abs()
    move_(p, update, kept=0.9, rate=0.02)
    assert bool(((p.double() - want).abs() <= 4 * FP32 * sizes).all())
    move_(weight, update, kept=0.9, rate=0.02, remainder=remainder)
    assert torch.equal(merged(weight, remainder), p)
    assert all(torch.equal(a, b) for a, b in zip((weight, remainder), halves(p), strict=True))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("buffer", DTYPES)
@pytest.mark.parametrize("grad", DTYPES)
def test_momentum(grad: torch.dtype, buffer: torch.dtype, nesterov: bool) -> None:
    assert_momentum(1000, grad, buffer, nesterov, "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_move(dtype: torch.dtype) -> None:
    assert_moved(1000, "cpu", dtype)


def test_what_is_strided_is_refused() -> None:
    p, grad, mean, update = (t.view(10, 10).t() for t in drawn(100))
    with pytest.raises(ValueError, match="contiguous"):
        momentum(grad, mean, keep=0.9, nesterov=True)
    with pytest.raises(ValueError, match="contiguous"):
        move_(p.contiguous(), update, kept=1.0, rate=1.0)


def interpreted() -> None:
    """On CPU tensors, in a process of its own; there it truncates to bf16."""
    from phalanx.extras.muon.elementwise_triton import launch_momentum, launch_move

    for n in (1, 4096, 5000):
        for nesterov in (False, True):
            for dtype in DTYPES:
                _, grad, mean, _ = (t.to(dtype) for t in drawn(n))
                other, found = mean.clone(), torch.empty(n)
                rounded, third = torch.empty(n, dtype=torch.bfloat16), mean.clone()
                want = momentum(grad, mean, keep=0.95, nesterov=nesterov, clip_coef=0.7)
                launch_momentum(grad, other, found, 0.95, nesterov, torch.tensor(0.7))
                launch_momentum(grad, third, rounded, 0.95, nesterov, torch.tensor(0.7))
                torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-7)
                torch.testing.assert_close(rounded.float(), want, rtol=2**-7, atol=1e-7)
                torch.testing.assert_close(
                    other.float(),
                    mean.float(),
                    rtol=1e-5 if dtype == DTYPES[0] else 2**-7,
                    atol=1e-7,
                )
        p, *_, update = drawn(n)
        weight, remainder = halves(p)
        want = p.clone()
        move_(want, update, kept=0.9, rate=0.02)
        numbers = torch.tensor([0.9, 0.02])
        launch_move(p, update, *numbers, None)
        torch.testing.assert_close(p, want, rtol=1e-6, atol=1e-7)
        launch_move(weight, update, *numbers, remainder)
        assert torch.equal(merged(weight, remainder), p)


def test_kernels_interpreted() -> None:
    interpret(__name__)
