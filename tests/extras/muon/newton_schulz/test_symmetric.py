"""Gram matrices and their polynomials against fp64, and the kernel's code in an interpreter."""

import pytest
import torch
from torch import Tensor

from phalanx.extras.muon.newton_schulz.symmetric import gram, polynomial
from tests.kernels.interpreter import interpret

DTYPES = (torch.float32, torch.bfloat16)
ABC = (3.0, -4.0, 2.0)
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def assert_symmetric_products(shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    """Errors are those of fp32 sums and of few roundings; results are symmetric bit for bit."""
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=g).to(device, dtype) / max(shape[1:]) ** 0.5
    rows = x.double().mT if shape[1] > shape[2] else x.double()
    found = gram(x)
    assert_rounded(found, rows @ rows.mT, rows.abs() @ rows.abs().mT, roundings=1)
    exact, sizes = found.double(), found.double().abs()
    eye = torch.eye(exact.shape[1], dtype=torch.float64, device=device)
    want, terms = 2 * exact @ exact - 4 * exact + 3 * eye, 2 * sizes @ sizes + 4 * sizes + 3 * eye
    # torch rounds the square before it is added.
    roundings = 1 if x.is_cuda else 2
    assert_rounded(polynomial(found, ABC), want, terms, roundings)

    scale = torch.linspace(0.5, 2.0, len(x), device=device)
    s = scale.double()[:, None, None]
    exact, sizes = s * exact, s * sizes
    want, terms = 2 * exact @ exact - 4 * exact + 3 * eye, 2 * sizes @ sizes + 4 * sizes + 3 * eye
    assert_rounded(polynomial(found, ABC, scale), s**0.5 * want, s**0.5 * terms, roundings)


def assert_rounded(found: Tensor, want: Tensor, terms: Tensor, roundings: int) -> None:
    bound = roundings * EPS[found.dtype] * terms + 64 * EPS[torch.float32] * terms
    assert bool(((found.double() - want).abs() <= 1.01 * bound).all())
    if found.dtype == torch.bfloat16 and found.is_cuda:
        assert torch.equal(found, found.mT)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 17, 40), (2, 40, 17), (1, 16, 16), (2, 1, 3)])
def test_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert_symmetric_products(shape, dtype, "cpu")


def test_strided_matrices_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        gram(torch.randn(2, 4, 6).mT)


def interpreted() -> None:
    """On CPU tensors, in a process of its own."""
    from phalanx.extras.muon.newton_schulz.symmetric_triton import launch

    for shape in ((2, 300, 70), (1, 128, 64), (3, 5, 130)):
        x = torch.randn(shape) / shape[2] ** 0.5
        out = torch.empty(shape[0], shape[1], shape[1])
        launch(x, out)
        torch.testing.assert_close(out, x @ x.mT, rtol=1e-5, atol=1e-5)
        square = torch.empty_like(out)
        launch(out, square, ABC)
        want = 2 * out @ out - 4 * out + 3 * torch.eye(shape[1])
        torch.testing.assert_close(square, want, rtol=1e-5, atol=1e-4)
        scale = torch.rand(len(x)) + 0.5
        launch(out, square, ABC, scale)
        want = polynomial(out, ABC, scale)
        torch.testing.assert_close(square, want, rtol=1e-5, atol=1e-4)
    tall = torch.randn(2, 130, 30)
    out = torch.empty(2, 30, 30)
    launch(tall.mT, out)
    torch.testing.assert_close(out, tall.mT @ tall, rtol=1e-5, atol=1e-4)


def test_kernel_interpreted() -> None:
    interpret(__name__)
