"""<dy[n], b2[e]> of all rows and experts on a GPU."""

import pytest

from tests.kernels.sm90.experts.test_bias_products import SHAPES, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("shape", [*SHAPES, (1000, 34, 2880), (4096, 200, 960)])
def test_bias_products(shape: tuple[int, int, int]) -> None:
    check(*shape, "cuda")
