"""The kernel that rotates pairs of channels, in Triton's interpreter, against PyTorch."""

import itertools

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("triton")

from phalanx.adapters.transformers.rotary import Kind, rotated
from tests.kernels.interpreter import interpret


def test_rotation_and_its_gradient() -> None:
    interpret(__name__)


def interpreted() -> None:
    from phalanx.adapters.transformers.rotary_triton import rotate

    kinds = Kind(False, True), Kind(False, False), Kind(True, True)
    for kind, width, batches in itertools.product(kinds, (16, 20), (1, 2)):
        P = 8
        x = torch.randn(2, 5, 3, width).transpose(1, 2).requires_grad_()
        angle = torch.rand(batches, 5, P).mul(6).repeat(1, 1, 1 + kind.repeated)
        want = rotated(x, angle.cos(), angle.sin(), kind)
        up = torch.randn(want.shape)
        (grad,) = torch.autograd.grad(want, x, up)
        options = dict(pairs=P, neighbours=kind.neighbours)
        got = rotate(x.detach(), angle.cos(), angle.sin(), **options, inverse=False)
        back = rotate(up, angle.cos(), angle.sin(), **options, inverse=True)
        torch.testing.assert_close(got, want.detach())
        torch.testing.assert_close(back, grad)
        assert got.stride() == x.stride()
