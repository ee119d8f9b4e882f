"""The sum of squares of many tensors against fp64."""

import math

import pytest
import torch

from phalanx.kernels.elementwise.sums import square_sum

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[0], [1], [7, 0, 4097], [(1 << 20) - 1, 1 << 20, 4_500_001, 3]])
def test_is_that_of_fp64(sizes: list[int], dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(len(sizes))
    given = [torch.randn(n, generator=g).to(dtype).to(device) for n in sizes]
    exact = sum(t.double().square().sum().item() for t in given)
    got = square_sum(given)
    assert got.dtype == torch.float64 and got.shape == () and got.device.type == device
    assert got.item() == pytest.approx(exact, rel=1e-6)
    assert square_sum(given).item() == got.item()  # bit for bit
    assert square_sum([t.view(1, -1) for t in given]).item() == got.item()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(value: float, device: str) -> None:
    x = torch.zeros(3_000_001, device=device)
    x[-1] = value
    assert not math.isfinite(square_sum([torch.ones(2, device=device), x]).item())


def test_strided_tensors(device: str) -> None:
    x = torch.randn(1200, 1100, generator=torch.Generator().manual_seed(0)).to(device)
    assert square_sum([x.T]).item() == pytest.approx(square_sum([x]).item(), rel=1e-6)
