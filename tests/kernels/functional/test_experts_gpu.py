"""The functions of experts on an NVIDIA GPU: accuracy, padding, capture."""

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.api import (
    Activation,
    KernelUnavailable,
    grouped_experts,
    grouped_experts_sorted,
)
from tests.kernels.capture import check_replay
from tests.kernels.problems import error

pytestmark = pytest.mark.gpu
E, D, WIDTH, K, T = 8, 256, 192, 3, 300
GPT_OSS = Activation("quick_geglu", limit=7.0, offset=1.0)


def problem(act: Activation, bias: bool) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    g = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=g, device="cuda") * shape[-1] ** -0.5).bfloat16()

    H = act.width(WIDTH)
    weights = [draw(E, H, D), draw(E, D, WIDTH), *((draw(E, H), draw(E, D)) if bias else ())]
    prob, idx = torch.rand(T, E, generator=g, device="cuda").topk(K)
    x = torch.randn(T, D, generator=g, device="cuda").bfloat16()
    leaves = [x, prob, *weights]
    for leaf in leaves:
        leaf.requires_grad_()
    return x, idx, prob, weights


def results(function: Any, *given: Any, leaves: list[Tensor], **options: Any) -> list[Tensor]:
    try:
        out = function(*given, **options)
    except KernelUnavailable as reason:
        pytest.skip(str(reason))
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_as_exact(
    got: list[Tensor], function: Any, given: Any, leaves: list[Tensor], **options: Any
) -> None:
    """Errors, by fp32 without a recipe, are no larger than those of the reference."""
    theirs = results(function, *given, leaves=leaves, backend="reference", **options)
    exact_of = {id(leaf): leaf.detach().float().requires_grad_() for leaf in leaves}
    floats = [exact_of.get(id(x), x) for x in given]
    wanted = [exact_of[id(leaf)] for leaf in leaves]
    plain = options | {"recipe": None}
    exact = results(function, *floats, leaves=wanted, backend="reference", **plain)
    for ours, reference, true in zip(got, theirs, exact, strict=True):
        assert ours.isfinite().all()
        assert error(ours, true) <= 1.1 * error(reference, true) + 1e-3


@pytest.mark.parametrize("recipe", [None, "fp8_block"])
@pytest.mark.parametrize("backend", ["fused", "torch"])
@pytest.mark.parametrize(("act", "bias"), [(Activation("swiglu"), False), (GPT_OSS, True)])
def test_against_the_reference(act: Any, bias: bool, backend: str, recipe: str | None) -> None:
    x, idx, prob, weights = problem(act, bias)
    given, leaves = (x, idx, prob, *weights), [x, prob, *weights]
    options = dict(activation=act, recipe=recipe)
    got = results(grouped_experts, *given, leaves=leaves, backend=backend, **options)
    assert_as_exact(got, grouped_experts, given, leaves, **options)


@pytest.mark.parametrize("recipe", [None, "fp8_block"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("backend", ["fused", "torch"])
def test_sorted_rows(backend: str, weighted: bool, recipe: str | None) -> None:
    """Padding is 0 forwards and backwards, whatever it holds."""
    x, _, prob, weights = problem(GPT_OSS, True)
    counts = torch.tensor([40, 0, 100, 1, 7, 33, 50, 20], device="cuda")
    used, row_prob = 251, prob[:, 0] if weighted else None
    with torch.no_grad():
        x[used:] = float("nan")
    leaves = [x, *weights]
    options = dict(activation=GPT_OSS, recipe=recipe)
    given = (x, counts, row_prob, *weights)
    got = results(grouped_experts_sorted, *given, leaves=leaves, backend=backend, **options)
    assert not got[0][used:].any() and not got[1][used:].any()
    assert_as_exact(got, grouped_experts_sorted, given, leaves, **options)


@pytest.mark.parametrize("recipe", [None, "fp8_block"])
def test_captured(recipe: str | None) -> None:
    x, idx, prob, weights = problem(GPT_OSS, True)
    leaves = [x, prob, *weights]

    def step() -> list[Tensor]:
        options = dict(leaves=leaves, activation=GPT_OSS, recipe=recipe)
        return results(grouped_experts, x, idx, prob, *weights, **options)

    check_replay(step, idx, idx.flip(0))
