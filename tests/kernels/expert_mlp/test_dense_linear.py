"""A linear layer in FP8 against fp64 products of what is FP8."""

import pytest
import torch

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.dense_mlp import dense_linear
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize import blocks
from phalanx.kernels.quantize.recipe import FORMATS, Fp8Block
from tests.kernels.problems import error

N, I, O = 150, 160, 136  # noqa: E741


def spec_of(recipe: Fp8Block | None, backend: str = "torch", **how) -> MLPSpec:
    return MLPSpec(Activation("swiglu"), backend, recipe=recipe, **how)


def tensors(bias: bool = True) -> list[torch.Tensor | None]:
    g = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(s, generator=g).bfloat16() for s in ((N, I), (O, I), (O,)))
    return [x.requires_grad_(), w.requires_grad_(), b.requires_grad_() if bias else None]


def rows(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return blocks.dequantize_rows(blocks.quantize_rows(x.detach(), dtype=dtype)).double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Block(grad_format="e5m2", wgrad="bf16")])
def test_products_are_those_of_fp8(recipe, backend, bias):
    x, w, b = tensors(bias)
    dy = torch.randn(N, O, generator=torch.Generator().manual_seed(1)).bfloat16()
    y = dense_linear(x, w, b, spec_of(recipe, backend))
    y.backward(dy)
    grad = FORMATS[recipe.grad_format]
    wq = blocks.dequantize_weights(blocks.quantize_weights(w.detach()[None]).forward)[0].double()
    want = rows(x) @ wq.T + (0 if b is None else b.detach().double())
    assert error(y, want) < 3e-3
    assert error(x.grad, rows(dy, grad) @ wq) < 3e-3
    of_wgrad = [dy.double(), x.detach().double()]
    if recipe.wgrad == "fp8":
        offsets = torch.tensor([0, N], dtype=torch.int32)
        of_wgrad = [
            blocks.dequantize_columns(blocks.quantize_columns(t.float(), offsets), offsets, N)
            for t in (rows(dy, grad), rows(x))
        ]
    assert error(w.grad, of_wgrad[0].double().T @ of_wgrad[1].double()) < 3e-3
    if b is not None:
        assert error(b.grad, dy.double().sum(0)) < 5e-3


def test_without_a_recipe_it_is_a_linear_layer():
    x, w, b = tensors()
    got = dense_linear(x, w, b, spec_of(None))
    assert error(got, x.double() @ w.double().T + b.double()) < 5e-3


def test_gradients_go_to_the_buffer():
    x, w, _ = tensors(False)
    dense_linear(x, w, None, spec_of(Fp8Block())).sum().backward()
    once = w.grad.clone()
    w.grad, w.main_grad, w.grad_added_to_main_grad = None, torch.ones(O, I), False
    dense_linear(x, w, None, spec_of(Fp8Block(), accumulate=True)).sum().backward()
    assert w.grad_added_to_main_grad
    assert error(w.main_grad - 1, once) < 4e-3


def test_what_does_not_fit():
    x, w, _ = tensors()
    with pytest.raises(ValueError, match=r"expected x \[N, I\] and w \[O, I\]"):
        dense_linear(x, w.T, None, spec_of(Fp8Block()))
