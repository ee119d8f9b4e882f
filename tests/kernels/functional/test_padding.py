"""Experts whose width kernels do not take: zeros behind their channels change nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.api import SortedRows, TopK, experts, resolve_backend
from phalanx.kernels.functional import choice
from phalanx.kernels.functional import experts as functional
from phalanx.kernels.functional.layouts import LAYOUTS, padded_layout

E, D, F, T, K = 4, 64, 72, 33, 3


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Turns padding to 128 channels on and off for kernels that would not need it."""

    def turn(on: bool) -> None:
        def fitted(options: Any, problem: Any, layout: str = "halves") -> Any:
            wider = problem._replace(ffn=128), padded_layout(layout, problem.ffn, 128)
            return wider if on else (problem, layout)

        for module in (choice, functional):
            monkeypatch.setattr(module, "fitted", fitted)
        choice._chosen.cache_clear()

    yield turn
    choice._chosen.cache_clear()


def made(
    layout: str, gated: bool, biases: bool, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> list[Tensor | None]:
    """x, prob, w1, w2, b1 and b2."""
    torch.manual_seed(0)
    H = 2 * F if gated else F
    flipped = LAYOUTS[layout].transposed
    shapes = [
        (T, D),
        (T, K),
        (E, D, H) if flipped else (E, H, D),
        (E, F, D) if flipped else (E, D, F),
    ]
    shapes += [(E, H), (E, D)] if biases else []
    tensors = [torch.randn(*shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    return [*tensors, *[None] * (6 - len(tensors))]


class Alone:
    """A group of one rank."""

    size = 1

    def exchange(self, x: Tensor, routing: TopK, weights: Any, spec: Any) -> Tensor:
        self.ffn = weights.w2.shape[-1]
        return experts(x, routing, weights, {"backend": spec.backend})


def results(
    given: list[Tensor | None], routing: Any, group: Any = None, **options: Any
) -> list[Tensor]:
    """Output and gradients."""
    x, prob, *weights = given
    out = experts(x, routing(prob), weights, options, group)
    wanted = [t for t in given if t is not None]
    # Independent of `out`, whose rounding would change it.
    grad = torch.arange(out.numel(), device=out.device).cos().view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad(out, wanted, grad)]


def check(want: list[Tensor], got: list[Tensor], *, error: float) -> None:
    for one, other in zip(want, got, strict=True):
        assert other.shape == one.shape and (one - other).norm() <= error * one.norm()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("activation", ["swiglu", "quick_geglu", "squared_relu"])
@pytest.mark.parametrize("biases", [False, True])
def test_output_and_gradients_stay(
    layout: str, activation: str, biases: bool, padding: Any
) -> None:
    gated = activation != "squared_relu"
    if LAYOUTS[layout].interleaved and not gated:
        pytest.skip("gate and up channels alternate")
    given = made(layout, gated, biases)
    index = torch.randint(-1, E, (T, K))
    for routing in (lambda p: TopK(index, p), lambda p: SortedRows([9, 0, 20, 1], p[:, 0])):
        found = []
        for on in (False, True):
            padding(on)
            found.append(
                results(given, routing, activation=activation, layout=layout, backend="reference")
            )
        check(*found, error=1e-11)


def test_ranks_exchange_rows_of_padded_experts(padding: Any) -> None:
    given, group = made("transposed", True, True), Alone()
    route = lambda p: TopK(torch.zeros(T, K, dtype=torch.int32), p)  # noqa: E731
    found = []
    for on in (False, True):
        padding(on)
        found.append(results(given, route, group, layout="transposed", backend="reference"))
        assert group.ffn == (128 if on else F)
        padding(False)
    check(*found, error=1e-11)


def test_compiled_graphs_know_the_shapes(padding: Any) -> None:
    given = made("halves", True, False)
    index = torch.randint(0, E, (T, K))
    call = lambda *t: results(list(t), lambda p: TopK(index, p), backend="reference")  # noqa: E731
    padding(False)
    want = call(*given)
    padding(True)
    got = torch.compile(call, backend="aot_eager")(*given)
    check(want, got, error=1e-11)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["halves", "transposed_interleaved"])
def test_fused_kernels_compute_them(layout: str) -> None:
    """Eager calls, recorded ones too, and a captured one, against fp64."""
    global F
    F, before = 648, F
    try:
        given = made(layout, True, True, "cuda", torch.bfloat16)
        index = torch.randint(0, E, (T, K), device="cuda")
        exact = [None if t is None else t.detach().double().requires_grad_() for t in given]
    finally:
        F = before
    x, _, w1, w2, *_ = given
    assert resolve_backend(x, w1, w2, K, layout=layout).backend == "fused"
    options: Any = dict(activation="swiglu", layout=layout)
    want = results(exact, lambda p: TopK(index, p), backend="reference", **options)
    for _ in range(3):
        check(want, results(given, lambda p: TopK(index, p.float()), **options), error=0.01)
