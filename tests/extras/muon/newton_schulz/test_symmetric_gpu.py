"""The kernel of symmetric products on a GPU, against fp64."""

import pytest
import torch

from tests.extras.muon.newton_schulz.test_symmetric import DTYPES, assert_symmetric_products

pytestmark = pytest.mark.gpu

SHAPES = [(2, 128, 64), (3, 512, 1024), (2, 1024, 512), (2, 300, 77), (1, 77, 1000), (4, 1, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    assert_symmetric_products(shape, dtype, "cuda")


def test_many_small_matrices() -> None:
    assert_symmetric_products((70_000, 8, 8), torch.bfloat16, "cuda")
