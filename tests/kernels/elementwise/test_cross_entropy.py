"""Corrections of foretold gradients, by Triton's interpreter. On a GPU they and the rest are tested
with the loss that they are of (`tests/moe/model/test_loss_gpu.py`)."""

import math

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.interpreter import interpret

GRADS = [0.5, 0.0, -1.5, 0.5 * (1 + 2e-7), 2.0, math.nan, math.inf]
"""Gradients of losses; 0.5 was expected."""


def interpreted() -> None:
    from phalanx.kernels.elementwise.cross_entropy import rescale_

    made = torch.randn(len(GRADS), 5000, generator=torch.Generator().manual_seed(0))
    made[:, 17] = -1.0
    grad = torch.tensor(GRADS)
    got = made.clone()
    rescale_(got, grad, torch.tensor(0.5))
    assert torch.equal(got[0], made[0]) and torch.equal(got[3], made[3])
    assert not got[1].any()
    for row in (2, 4):
        assert torch.equal(got[row], made[row] * (GRADS[row] / 0.5))
    assert bool(got[5].isnan().all()) and not bool(got[6].isfinite().any())


def test_rows_of_other_gradients_are_rescaled() -> None:
    interpret(__name__)
