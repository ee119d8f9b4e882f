"""The statement in torch against formulas token by token in fp64: outputs and gradients."""

import pytest
import torch
from torch import Tensor

from phalanx.extras.linear_attention.gated_delta import (
    causal_conv,
    gated_delta_rule,
    gated_rms_norm,
)
from tests.extras.linear_attention import recurrent
from tests.extras.linear_attention.problems import CASES, Case, given, gradient


def close(found: Tensor, exact: Tensor, bound: float) -> None:
    error = (found.double() - exact).norm() / exact.norm().clamp(min=1e-12)
    assert error < bound, f"relative error {error:.1e}"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_chunks_are_the_recurrence(case: Case, dtype: torch.dtype) -> None:
    leaves = given(case, dtype)
    out = gated_delta_rule(*leaves, case.position_BS)
    assert out.dtype == dtype and out.shape == leaves[2].shape
    found = torch.autograd.grad(out, leaves, gradient(out))
    exact_leaves = [x.detach().double().requires_grad_() for x in leaves]
    exact_out = recurrent.rule(*exact_leaves, case.position_BS)
    exact = torch.autograd.grad(exact_out, exact_leaves, gradient(exact_out))
    bound = 1e-12 if dtype == torch.float64 else 2e-5
    close(out, exact_out, bound)
    for mine, theirs in zip(found, exact, strict=True):
        close(mine, theirs, bound)


@pytest.mark.parametrize("case", CASES)
def test_convolution(case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    shape = (case.B, case.S, 6)
    x = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
    w = torch.randn(6, 4, dtype=torch.float64, generator=generator).requires_grad_()
    out, exact = causal_conv(x, w, case.position_BS), recurrent.conv(x, w, case.position_BS)
    torch.testing.assert_close(out, exact)
    for found, wanted in zip(
        torch.autograd.grad(out, (x, w), gradient(out)),
        torch.autograd.grad(exact, (x, w), gradient(out)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def test_gated_norm() -> None:
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(2, 3, 4, 8, dtype=torch.float64, generator=generator) for _ in "xg")
    leaves = [x.requires_grad_(), gate.requires_grad_(), torch.rand(8).double().requires_grad_()]
    out, exact = gated_rms_norm(*leaves, 1e-3), recurrent.norm(*leaves, 1e-3)
    torch.testing.assert_close(out, exact)
    torch.autograd.backward(out, gradient(out))
    for leaf, wanted in zip(leaves, torch.autograd.grad(exact, leaves, gradient(out)), strict=True):
        torch.testing.assert_close(leaf.grad, wanted)


def test_bf16_is_rounded_once() -> None:
    """Sums and states are fp32: the error is that of rounding inputs and output."""
    case = CASES[3]
    leaves = given(case, torch.bfloat16)
    out = gated_delta_rule(*leaves)
    assert out.dtype == torch.bfloat16
    exact = recurrent.rule(*leaves)
    assert ((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("case", [c for c in CASES if c.documents])
def test_documents_are_as_if_alone(case: Case) -> None:
    q, k, v, log_decay, beta = given(case, torch.float64)
    out = gated_delta_rule(q, k, v, log_decay, beta, case.position_BS)
    assert case.documents is not None
    for b, begins in enumerate(case.documents):
        for first, end in zip(begins, (*begins[1:], case.S), strict=True):
            alone = gated_delta_rule(*(x[b : b + 1, first:end] for x in (q, k, v, log_decay, beta)))
            torch.testing.assert_close(out[b : b + 1, first:end], alone)


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown backend 'cuda' of linear attention"):
        gated_delta_rule(*given(CASES[0]), backend="cuda")
