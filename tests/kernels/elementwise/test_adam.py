"""AdamW with moments in bf16 against fp64, master copies in two halves, and the kernel's code.

An interpreter runs that.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from phalanx.kernels.elementwise import adam
from phalanx.kernels.elementwise.adam import Update, merged, split_, update_
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
    """The result is that of a gradient multiplied by `coef` in a separate pass."""
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


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and remainder."""
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    split_(master, weight, remainder)
    return weight, remainder


def finite() -> Tensor:
    """fp32 of any exponent, and all that round to finite and are next to something special."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0x7F7F8000, (200_000,), generator=generator)
    upper = torch.randint(0x7F7F, (1000,), generator=generator) << 16
    near = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]  # from a weight to the next
    special = [0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7F0000, 0x7F7F7FFF]
    bits = torch.cat([bits, *(upper + n for n in near), torch.tensor(special)])
    return torch.cat([bits, bits - 2**31]).int().view(torch.float32)  # both signs


def test_halves_hold_every_bit() -> None:
    master = finite()
    weight, remainder = halves(master)
    assert weight.isfinite().all()
    assert torch.equal(merged(weight, remainder).view(torch.int32), master.view(torch.int32))
    alone = merged(weight, torch.zeros_like(remainder))
    assert torch.equal(alone.view(torch.int32), weight.float().view(torch.int32))


def test_a_weight_is_the_nearest_to_its_master() -> None:
    """torch rounds ties to even, halves round them away from zero."""
    master = finite()
    weight, remainder = halves(master)
    tie = remainder == -(2**15)
    assert 2000 <= int(tie.sum()) < len(tie)
    bits, even = weight.view(torch.int16), master.bfloat16().view(torch.int16)
    assert torch.equal(bits[~tie], even[~tie])
    assert bool((weight.double().abs() > master.double().abs())[tie].all())
    apart = (weight.double() - master.double()).abs()
    assert torch.equal(apart, (master.bfloat16().double() - master.double()).abs())


def assert_as_with_masters(master: Tensor) -> None:
    """20 steps on the halves leave what they leave on the whole, bit for bit."""
    weight, remainder = halves(master)
    n, device = len(master), master.device
    moments = [t.to(device) for t in drawn(n)[2:]]
    others = [t.clone() for t in moments]
    for step in range(1, 21):
        grad = drawn(n, seed=step)[1].to(device)
        how = Update(**HOW, step=step, clip_coef=0.7)
        update_(master, grad, *moments, how)
        update_(weight, grad, *others, how, remainder)
        same = merged(weight, remainder).view(torch.int32) == master.view(torch.int32)
        assert same.all(), master[~same]
        assert all(torch.equal(a, b) for a, b in zip(moments, others, strict=True))
    want = halves(master)
    assert torch.equal(weight, want[0]) and torch.equal(remainder, want[1])


def test_halves_are_updated_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "_SLICE", 37_000)
    assert_as_with_masters(torch.cat([drawn(1000)[0], finite()]))


def test_dtypes_that_do_not_go_together_are_refused() -> None:
    p, g, m, v = drawn(10)
    weight, remainder = halves(p)
    for parameter, rest in ((p, remainder), (weight, None)):
        with pytest.raises(ValueError, match="remainder"):
            update_(parameter, g, m, v, Update(**HOW, step=1), rest)


def test_strided_parameters_are_refused() -> None:
    p, g, m, v = (t.view(10, 10).t() for t in drawn(100))
    with pytest.raises(ValueError, match="contiguous"):
        update_(p, g, m, v, Update(**HOW, step=1))


def interpreted() -> None:
    """The kernel's code on CPU tensors, in a process of its own; there it truncates to bf16."""
    from phalanx.kernels.elementwise.adam_triton import launch

    for n, coef in ((1, 1.0), (4096, 0.3), (5000, 1.0)):
        given, expected, how = drawn(n), drawn(n), Update(**HOW, step=3, clip_coef=coef)
        launch(*given, how)
        update_(*expected, how)
        torch.testing.assert_close(given[0], expected[0], rtol=1e-6, atol=1e-7)
        for got, want in zip(given[2:], expected[2:], strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-12)
        master, *others = drawn(n)
        weight, remainder = halves(master)
        launch(weight, *others, how, remainder)
        assert torch.equal(merged(weight, remainder), given[0])
        assert all(torch.equal(a, b) for a, b in zip(others[1:], given[2:], strict=True))


def test_kernel_interpreted() -> None:
    interpret(__name__)
