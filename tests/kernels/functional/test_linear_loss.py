"""`linear_cross_entropy` against torch's loss of whole logits in fp64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from phalanx.kernels.api import linear_cross_entropy

D = 16


def problem(tokens: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, D, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[1::3] = -100
    return x, weight, labels


def exact(x: Tensor, weight: Tensor, labels: Tensor, factor: Any, **options: Any) -> list[Tensor]:
    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    loss = cross_entropy(leaves[0] @ leaves[1].T, labels, **options) * factor
    return [loss, *torch.autograd.grad(loss.sum(), leaves)]


@pytest.mark.parametrize(
    ("dtype", "chunk"), itertools.product((torch.float64, torch.float32, torch.bfloat16), (4, None))
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_values_and_gradients(dtype: torch.dtype, chunk: int | None, reduction: str) -> None:
    for tokens, vocabulary in ((11, 37), (1, 5)):
        x, weight, labels = problem(tokens, vocabulary, dtype)
        factor = torch.randn(tokens).double() if reduction == "none" else 0.7
        loss = linear_cross_entropy(x, weight, labels, reduction=reduction, chunk=chunk)
        found = [loss, *torch.autograd.grad((loss * factor).sum(), (x, weight))]
        want = exact(x, weight, labels, factor, reduction=reduction)
        want[0] = want[0] / factor
        bound = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
        for got, correct in zip(found, want, strict=True):
            assert got.shape == correct.shape
            assert (got.double() - correct).norm() <= bound * (correct.norm() + 1e-6)


def test_several_chunks_sum_the_gradient_of_the_weight_in_fp32() -> None:
    """As exact as one product, where bf16 sums would lose small terms."""
    x, weight, labels = problem(512, 8, torch.bfloat16)
    _, _, want = exact(x, weight, labels, 1.0, reduction="sum")

    def error(chunk: int) -> float:
        loss = linear_cross_entropy(x, weight, labels, reduction="sum", chunk=chunk)
        (got,) = torch.autograd.grad(loss, weight)
        return (got.double() - want).norm().item()

    assert error(2) <= 1.2 * error(512)


def test_a_number_of_items_divides_the_sum() -> None:
    x, weight, labels = problem(9, 20, torch.float32)
    total = linear_cross_entropy(x, weight, labels, reduction="sum")
    for items in (5, 5.0, torch.tensor(5)):
        loss = linear_cross_entropy(x, weight, labels, num_items=items)
        torch.testing.assert_close(loss, total / 5)


def test_without_a_label_it_is_as_torch_has_it() -> None:
    x, weight, labels = problem(5, 20, torch.float32)
    labels[:] = 7
    options: dict[str, Any] = dict(ignore_index=7)
    loss = linear_cross_entropy(x, weight, labels, **options)
    assert loss.isnan() and cross_entropy(x @ weight.T, labels, **options).isnan()
    assert not any(g.any() for g in torch.autograd.grad(loss, (x, weight)))
    assert linear_cross_entropy(x, weight, labels, reduction="sum", **options) == 0
    empty = linear_cross_entropy(x[:0], weight, labels[:0], reduction="sum")
    assert empty == 0 and not torch.autograd.grad(empty, weight)[0].any()


def test_leaves_that_need_no_gradient_and_other_shapes() -> None:
    x, weight, labels = problem(12, 20, torch.float32)
    whole = cross_entropy(x @ weight.T, labels)
    for needs in itertools.product((False, True), repeat=2):
        a, b = (t.detach().requires_grad_(n) for t, n in zip((x, weight), needs, strict=True))
        loss = linear_cross_entropy(a.view(3, 4, D), b, labels.view(3, 4), chunk=5)
        torch.testing.assert_close(loss, whole)
        assert loss.requires_grad == any(needs)
        if any(needs):
            loss.backward()
        assert [t.grad is not None for t in (a, b)] == list(needs)


def test_autocast_computes_in_its_dtype() -> None:
    x, weight, labels = problem(12, 20, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, labels)
        want = cross_entropy(torch.nn.functional.linear(x, weight).float(), labels)
    torch.testing.assert_close(loss, want)
    loss.backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=torch.zeros(5, 3)), "weight must be"),
        (dict(weight=torch.zeros(5, D).double()), "give them one dtype"),
        (dict(labels=torch.zeros(3, dtype=torch.long)), "labels must be"),
        (dict(labels=torch.zeros(4)), "labels must hold integers"),
        (dict(reduction="median"), "reduction=median is unknown: use mean, sum, none"),
        (dict(chunk=0), "chunk=0 must be at least 1"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = dict(
        x=torch.zeros(4, D), weight=torch.zeros(5, D), labels=torch.zeros(4, dtype=torch.long)
    )
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**(given | change))


@pytest.mark.parametrize("label", [7, -1])
def test_a_label_that_is_no_token_is_refused(label: int) -> None:
    x, weight, labels = torch.randn(3, 4), torch.randn(7, 4), torch.tensor([0, -100, label])
    with pytest.raises(ValueError, match=f"labels has {label}, which is no token from 0 to 6 and"):
        linear_cross_entropy(x, weight, labels)
