"""Router logits of bf16 operands and their gradients, against fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.moe.router import logits


def compare(device: str, T: int, D: int, E: int, bias: bool) -> None:
    """Logits to fp32's rounding of a sum; gradients to bf16's, once."""
    torch.manual_seed(0)
    drawn = [torch.randn(shape, device=device).bfloat16() for shape in ((T, D), (E, D), (E,))]
    leaves = [t.requires_grad_() for t in drawn[: 2 + bias]]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    out = logits.Gate.apply(*leaves, *[None] * (not bias))
    want = torch.nn.functional.linear(*exact)
    assert out.dtype == torch.float32
    terms = exact[0].abs() @ exact[1].abs().t() + 4
    assert bool(((out.double() - want).abs() <= 2**-22 * terms).all())
    up = torch.randn(T, E, device=device) * torch.logspace(-4, 0, E, device=device)
    got = torch.autograd.grad(out, leaves, up)
    grads = torch.autograd.grad(want, exact, up.double())
    sizes = (up.abs() @ leaves[1].abs().float(), up.abs().t() @ leaves[0].abs().float())
    for g, w, size in zip(got, grads, (*sizes, up.abs().sum(0)), strict=False):
        assert g.dtype == torch.bfloat16
        bound = 2**-8 * w.abs() + 2**-15 * size.double()
        assert bool(((g.double() - w).abs() <= bound).all())


SHAPES = [(1, 8, 4, True), (33, 64, 8, False), (257, 320, 32, True), (64, 48, 5, False)]


@pytest.mark.parametrize(("T", "D", "E", "bias"), SHAPES)
def test_rounds_gradients_once(
    T: int, D: int, E: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:  # as torch has it on GPUs only
        assert a.dtype == b.dtype == torch.bfloat16
        return a.float() @ b.float()

    monkeypatch.setattr(logits, "product", product)
    compare("cpu", T, D, E, bias)


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "D", "E", "bias"), [*SHAPES, (4096, 2880, 32, True)])
def test_on_a_gpu(T: int, D: int, E: int, bias: bool) -> None:
    compare("cuda", T, D, E, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
def test_takes_the_place_of_megatron(bias: bool) -> None:
    """Other dtypes go to Megatron-Core's; the public function gives the same either way."""
    torch.manual_seed(0)
    x, w, b = (torch.randn(s, device="cuda").bfloat16() for s in ((40, 64), (8, 64), (8,)))
    given: Any = (x, w, b if bias else None)
    wide: Any = (x.float(), w.float(), b.float() if bias else None)
    torch.testing.assert_close(logits.gate(*given), logits.gate(*wide), rtol=1e-5, atol=1e-5)
