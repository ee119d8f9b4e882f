"""Rows of another size and products with a scalar: in PyTorch, by an interpreter, on a GPU."""

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from phalanx.kernels.functional.copies import resize_rows, scaled
from tests.kernels.interpreter import interpret

SIZES = [(1, 1, 1), (3, 648, 704), (3, 704, 648), (2, 81, 128), (5, 7, 3), (2, 3000, 3100)]
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


def check_rows(resize: Callable[[Tensor, int], Tensor], device: str = "cpu") -> None:
    for dtype in DTYPES:
        for rows, channels, wanted in SIZES:
            whole = torch.randn(1 + rows * channels, device=device).to(dtype)
            for begin in (0, 1):  # from an address that is no multiple of eight bytes too
                x = whole[begin : begin + rows * channels].view(rows, channels)
                got, kept = resize(x, wanted), min(channels, wanted)
                assert got.shape == (rows, wanted) and got.is_contiguous() and got.dtype == dtype
                assert torch.equal(got[:, :kept], x[:, :kept]) and not got[:, kept:].any()


def check_product(
    product: Callable[[Tensor, Tensor, torch.dtype], Tensor], device: str = "cpu"
) -> None:
    for size in (1, 4096, 5000):
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(2, size, device=device)
            factor = torch.tensor(0.3, device=device)
            for given in (x.to(dtype), x.to(dtype).t()):
                got = product(given, factor, torch.bfloat16)
                assert torch.equal(got, (given.float() * factor).bfloat16())


def test_torch() -> None:
    check_rows(resize_rows)
    check_product(scaled)


def interpreted() -> None:
    from phalanx.kernels.functional.copies_triton import resize, scale

    def product(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.full((x.numel() + 1,), 9.0, dtype=dtype)  # nothing is written past its end
        scale(x.contiguous(), factor, out[:-1])
        assert out[-1] == 9
        return out[:-1].view(x.shape)

    with mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()):
        check_rows(resize)
        check_product(product)


def test_the_kernels_by_an_interpreter() -> None:
    pytest.importorskip("triton")
    interpret(__name__)


@pytest.mark.gpu
def test_the_kernels() -> None:
    check_rows(resize_rows, "cuda")
    check_product(scaled, "cuda")
