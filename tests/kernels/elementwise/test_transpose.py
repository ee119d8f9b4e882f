"""Copies of weights in the other order, against indices, and their gradients."""

import pytest
import torch

from phalanx.kernels.functional.layouts import transposed

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(1, 1, 2), (3, 5, 6), (2, 64, 128), (2, 130, 66), (4, 96, 2 * 65)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_element_is_where_it_belongs(
    device: str, dtype: torch.dtype, interleaved: bool
) -> None:
    for experts, hidden, channels in SHAPES:
        x = torch.randn(experts, hidden, channels, device=device, dtype=dtype)
        rows = list(range(channels))
        if interleaved:
            rows = [*range(0, channels, 2), *range(1, channels, 2)]
        want = torch.stack([x[:, :, h] for h in rows], dim=1)
        got = transposed(x, interleaved=interleaved, back=False)
        assert got.is_contiguous() and torch.equal(got, want)
        back = transposed(got, interleaved=interleaved, back=True)
        assert back.is_contiguous() and torch.equal(back, x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("back", [False, True])
def test_gradients_are_those_of_the_other_copy(device: str, back: bool) -> None:
    x = torch.randn(3, 10, 6, device=device, requires_grad=True)
    out = transposed(x, interleaved=True, back=back)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    assert torch.equal(x.grad, transposed(weight, interleaved=True, back=not back))


@pytest.mark.gpu
def test_offsets_of_large_weights_are_not_of_32_bits() -> None:
    x = torch.randint(-9, 9, (33, 8192, 8192), dtype=torch.int8, device="cuda")  # 2.2 G elements
    assert torch.equal(transposed(x, interleaved=False, back=False), x.mT)
