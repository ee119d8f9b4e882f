"""Where experts begin in transposed operands, by one kernel."""

import pytest
import torch

from phalanx.kernels.quantize import blocks as definition
from tests.kernels.interpreter import interpret

COUNTS = [[0], [1], [128], [129, 0, 127, 1], [0, 0, 300], [7] * 33, [1000, 0] * 64]


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def interpreted() -> None:
    from phalanx.kernels.quantize.column_offsets_triton import launch

    for counts in COUNTS:
        given = offsets_of(counts)
        assert torch.equal(launch(given), definition.column_offsets(given)), counts


def test_equals_the_definition() -> None:
    interpret(__name__)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_equals_the_definition_on_a_gpu(counts: list[int]) -> None:
    from phalanx.kernels.quantize.column_offsets_triton import column_offsets

    given = offsets_of(counts)
    assert torch.equal(column_offsets(given.cuda()).cpu(), definition.column_offsets(given))
