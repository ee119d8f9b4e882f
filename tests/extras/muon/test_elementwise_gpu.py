"""Muon's kernels on a GPU, against fp64."""

import pytest
import torch

from tests.extras.muon.test_elementwise import (
    DTYPES,
    assert_momentum,
    assert_moved,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("buffer", DTYPES)
@pytest.mark.parametrize("grad", DTYPES)
def test_momentum(grad: torch.dtype, buffer: torch.dtype, nesterov: bool) -> None:
    for n in (1, 4095, 4096, 1_000_003):
        assert_momentum(n, grad, buffer, nesterov, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 4095, 4096, 1_000_003])
def test_move(n: int, dtype: torch.dtype) -> None:
    assert_moved(n, "cuda", dtype)
