"""AdamW with moments in bf16 against fp64, and the kernel's code run by an interpreter."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import adam
from kernels.adam import Update, update_
from tests.kernels.interpreter import interpret

FP32 = 2.0**-24
"""Half a unit in the last place of 1."""
HOW = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def drawn(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parameter, gradient and bf16 moments in the middle of a run."""
    generator = torch.Generator().manual_seed(seed)
    p, g, m, v = (torch.randn(n, generator=generator) for _ in range(4))
    return p, 0.1 * g, (0.1 * m).bfloat16(), (0.01 * v.square()).bfloat16()


def stated(p: Tensor, g: Tensor, m: Tensor, v: Tensor, how: Update) -> tuple[Tensor, ...]:
    """The step of arXiv 1711.05101, fp64; nothing is rounded."""
    p, g, m, v = (t.double() for t in (p, g, m, v))
    m = how.beta1 * m + (1 - how.beta1) * g
    v = how.beta2 * v + (1 - how.beta2) * g * g
    mean, square = m / (1 - how.beta1**how.step), v / (1 - how.beta2**how.step)
    return p - how.lr * (how.weight_decay * p + mean / (square.sqrt() + how.eps)), m, v


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_step_rounds_the_moments_and_nothing_else(step: int) -> None:
    given, how = drawn(1000), Update(**HOW, step=step)
    if step == 1:
        given = (*given[:2], *(torch.zeros_like(t) for t in given[2:]))
    assert_updated(given, how)


def assert_updated(given: Sequence[Tensor], how: Update) -> None:
    """`update_` is the step, but for fp32 on the way and moments in bf16."""
    before = [t.clone() for t in given]
    before[1] = before[1] * how.clip_coef
    p, m, v = stated(*before, how)
    grad = given[1].clone()
    update_(*given, how)
    assert torch.equal(given[1], grad)
    # Ten roundings, and fp32 is as good as the terms that are added, which may cancel.
    sizes = [t.abs() for t in before]
    smallest, terms_m, _ = stated(*sizes, how)
    terms_p = 2 * sizes[0].double() - smallest
    assert bool(((given[0].double() - p).abs() <= 10 * FP32 * terms_p).all())
    assert_rounded_once(given[2], m, terms_m)
    assert_rounded_once(given[3], v, v)


def assert_rounded_once(got: Tensor, exact: Tensor, terms: Tensor) -> None:
    """bf16 to nearest: half a unit in the last of 8 digits; fp32 of `terms` on the way there."""
    assert got.dtype == torch.bfloat16
    binade_above = 2.0 ** torch.frexp(exact.abs()).exponent.double()
    bound = 2**-9 * binade_above + 4 * FP32 * terms
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("coef", [1.0, 0.3, 1e-6])
def test_clipping_on_the_way_has_the_bits_of_clipping_before(coef: float) -> None:
    assert_clipped(drawn(1000), coef)
    assert_updated(drawn(1000), Update(**HOW, step=3, clip_coef=coef))


def assert_clipped(given: Sequence[Tensor], coef: float) -> None:
    """As if the gradient had been multiplied by `coef` in a pass of its own."""
    p, g, m, v = (t.clone() for t in given)
    update_(p, g.mul_(coef), m, v, Update(**HOW, step=3))
    update_(*given, Update(**HOW, step=3, clip_coef=coef))
    for got, want in zip((given[0], *given[2:]), (p, m, v), strict=True):
        assert torch.equal(got, want)


def test_slices_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts, how = drawn(1000), drawn(1000), Update(**HOW, step=3)
    update_(*whole, how)
    monkeypatch.setattr(adam, "_SLICE", 37)
    update_(*parts, how)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_strided_parameters_are_refused() -> None:
    p, g, m, v = (t.view(10, 10).t() for t in drawn(100))
    with pytest.raises(ValueError, match="contiguous"):
        update_(p, g, m, v, Update(**HOW, step=1))


def interpreted() -> None:
    """The kernel's code on CPU tensors, in a process of its own; there it truncates to bf16."""
    from kernels.adam_triton import launch

    for n, coef in ((1, 1.0), (4096, 0.3), (5000, 1.0)):
        given, expected, how = drawn(n), drawn(n), Update(**HOW, step=3, clip_coef=coef)
        launch(*given, how)
        update_(*expected, how)
        torch.testing.assert_close(given[0], expected[0], rtol=1e-6, atol=1e-7)
        for got, want in zip(given[2:], expected[2:], strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-12)


def test_kernel_interpreted() -> None:
    interpret(__name__)
