"""The autograd around QuACK's kernels, with tensor code in their place; no GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from phalanx.kernels.elementwise import sums_triton
from phalanx.kernels.expert_mlp.main_grad import facts_of
from phalanx.kernels.rms_norm import quack
from phalanx.kernels.rms_norm.quack_library import Rows
from tests.kernels.rms_norm.problems import Problem, error, plain

CTAS = 3


def kernel(rows: Rows) -> Callable[..., None]:
    """The compiled function in torch, with checks of its arguments."""

    def forward(x, weight, _, residual, normed, total, rstd, __, eps):
        assert (residual is not None) == rows.adds == (total is not None)
        assert weight.dtype == (torch.float32 if rows.fp32_weight else torch.bfloat16)
        check(x, residual, normed, total)
        wide = x.float() if residual is None else x.float() + residual.float()
        if total is not None:
            total.copy_(wide)
        rstd.copy_((wide.square().mean(-1) + eps).rsqrt())
        normed.copy_(wide * rstd[:, None] * weight.float())

    def backward(total, weight, dnormed, dtotal, rstd, _, dx, partial, __, ___, ctas):
        assert (dtotal is not None) == rows.adds
        check(total, dnormed, dtotal, dx)
        hat, wide = total.float() * rstd[:, None], dnormed.float() * weight.float()
        d = (wide - hat * (hat * wide).mean(-1, keepdim=True)) * rstd[:, None]
        dx.copy_(d if dtotal is None else d + dtotal.float())
        for i in range(ctas):
            partial[i] = (dnormed.float() * hat)[i::ctas].sum(0)

    def check(*tensors: Tensor | None) -> None:
        for t in tensors:
            if t is not None:
                assert t.ndim == 2 and t.shape[1] == rows.channels and t.shape[0]
                assert t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0

    return forward if rows.step == "forward" else backward


@pytest.fixture(autouse=True)
def tensor_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_rows(partial: Tensor, out: Tensor, *, add: bool) -> Tensor:
        return out.copy_(partial.sum(0) + (out.float() if add else 0))

    monkeypatch.setattr(quack, "program", kernel)
    monkeypatch.setattr(quack, "_check", lambda *given: None)
    monkeypatch.setattr(quack, "_ctas", lambda N, device: CTAS)
    monkeypatch.setattr(sums_triton, "add_rows", add_rows)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("upstream", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 8), (0, 16)])
def test_both_gradients_arrive(residual, upstream, centered, shape):
    problem = Problem(shape, residual, upstream, centered=centered)
    exact, got = problem.exact(), problem.run("quack")
    for name, value in exact.items():
        assert got[name].dtype == torch.bfloat16 and got[name].shape == value.shape
        assert error(got[name], value) <= 2**-8, name


def test_a_sum_of_nothing_is_its_input_and_the_norm_alone_is_that_of_the_pair():
    problem = Problem((4, 6, 16), residual=False, upstream=(True, False))
    x, weight = problem.leaves(torch.bfloat16)
    normed, total = quack.fork(x, None, weight, 1e-5)
    assert total.data_ptr() == x.data_ptr()
    alone = quack.rms_norm(x, weight, 1e-5)
    assert torch.equal(normed, alone)
    got = problem.run("quack")
    for a, name in zip(plain(problem, "quack"), ("normed", "dx", "dweight"), strict=True):
        assert torch.equal(a, got[name])


@pytest.mark.parametrize("layout", ["slice", "misaligned", "odd stride", "expanded", "one row"])
def test_rows_of_any_layout(layout):
    whole = torch.randn(40, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = {
        "slice": whole[:, 8:24],
        "misaligned": whole[:, 4:20],
        "odd stride": whole.flatten()[: 40 * 17].view(40, 17)[:, :16],
        "expanded": whole[:1, :16].expand(5, 16),
        "one row": whole.flatten()[:17].view(1, 17)[:, :16],
    }[layout]
    weight = torch.rand(16).bfloat16().requires_grad_()
    results = []
    for given in (x, x.contiguous().clone()):
        leaf = given.detach().requires_grad_()
        out = quack.rms_norm(leaf, weight, 1e-5)
        d = torch.ones_like(out[:1]).expand_as(out)  # as of a sum
        results.append([out.detach(), *torch.autograd.grad(out, (leaf, weight), d)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_gradients_of_weights_go_to_their_buffer(replaces, wide):
    problem = Problem((6, 16))
    weight = torch.nn.Parameter(problem.given["weight"].clone())
    weight.main_grad = torch.full((16,), 3.0, dtype=wide)
    weight.grad_added_to_main_grad = False
    facts_of(weight).replaces_main_grad = replaces
    x = problem.given["x"].requires_grad_()
    for accumulate in (False, True):
        out = quack.rms_norm(x, weight, 1e-5, accumulate=accumulate)
        out.backward(problem.given["dnormed"])
        assert weight.grad_added_to_main_grad is accumulate
        if not accumulate:
            assert (weight.main_grad == 3).all()
            exact = weight.grad.float()
    want = exact if replaces else exact + 3
    torch.testing.assert_close(weight.main_grad.float(), want, rtol=2**-7, atol=2**-7)
    assert not facts_of(weight).replaces_main_grad


def test_a_frozen_weight_has_no_gradient():
    problem = Problem((6, 16), residual=False)
    x, weight = problem.given["x"].requires_grad_(), problem.given["weight"]
    quack.rms_norm(x, weight, 1e-5, accumulate=True).sum().backward()
    assert x.grad is not None and weight.grad is None
