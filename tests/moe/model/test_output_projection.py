"""The biased projection's gradients, and on a GPU its error beside a product and an addition."""

import pytest
import torch
from torch import Tensor

from tests.moe.cases import install

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
T, IN, D = 300, 64, 96


def given(device: str, dtype: torch.dtype) -> list[Tensor]:
    """x, w, b and the gradient of the result."""
    g = torch.Generator().manual_seed(0)
    sizes = ((T, IN), (D, IN), (D,), (T, D))
    drawn = (torch.randn(size, generator=g, dtype=torch.float64) for size in sizes)
    return [t.to(device, dtype) for t in drawn]


def results(tensors: list[Tensor], fused: bool) -> list[Tensor]:
    install()
    from phalanx.moe.model.grouped_attention import _Biased

    *leaves, upstream = tensors
    x, w, b = (t.clone().requires_grad_() for t in leaves)
    out = _Biased.apply(x, w, b, False) if fused else x @ w.t() + b
    return [out.detach(), *torch.autograd.grad(out, (x, w, b), upstream)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_as_exact_as_a_product_and_an_addition(device: str, dtype: torch.dtype) -> None:
    tensors = given(device, dtype)
    exact = results([t.double() for t in tensors], fused=False)
    plain, ours = results(tensors, fused=False), results(tensors, fused=True)
    for name, value, other, wanted in zip(
        ("out", "dx", "dw", "db"), ours, plain, exact, strict=True
    ):
        assert value.dtype == dtype
        error, others = ((t.double() - wanted).norm() / wanted.norm() for t in (value, other))
        assert error <= 1.1 * others + 1e-7, name


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replaces", [False, True])
def test_the_gradient_of_the_weight_goes_to_its_buffer(wide: torch.dtype, replaces: bool) -> None:
    from phalanx.kernels.expert_mlp.main_grad import facts_of
    from phalanx.moe.model.grouped_attention import _Biased

    x, w, b, upstream = given("cuda", torch.bfloat16)
    weight = torch.nn.Parameter(w)
    weight.main_grad = torch.full((D, IN), 5.0, dtype=wide, device="cuda")
    weight.grad_added_to_main_grad = False
    facts_of(weight).replaces_main_grad = replaces
    _Biased.apply(x, weight, b, True).backward(upstream)
    assert weight.grad_added_to_main_grad
    want = upstream.double().t() @ x.double() + (0 if replaces else 5)
    assert (weight.main_grad.double() - want).norm() <= 2**-8 * want.norm()
