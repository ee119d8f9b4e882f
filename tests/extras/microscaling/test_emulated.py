"""The recipes MXFP8 and NVFP4 of the expert MLP, against their own statement in fp64.

The statement walks over experts in fp64, rounds to bf16 and quantizes where the recipe does, and
shares nothing with the backends but the definition of a format. Two bf16 computations of the recipe
differ by roundings that fall either way. A GEMM that missed a quantization of MXFP8 differs by 3 %,
of NVFP4 by 10 %. `torch` rounds the gradient of a once more, which moves numbers to their
neighbours in the format: it is compared less closely.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.extras.microscaling import mxfp8, nvfp4
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.dense_mlp import dense_linear
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.quantize.recipe import Microscaling
from tests.kernels.problems import (
    SWIGLU,
    Problem,
    Result,
    error,
    formula,
    leaves_of,
    partial_blocks,
    run,
)

NEAREST = Microscaling("nvfp4", stochastic=False)
RECIPES = {
    "mxfp8": Microscaling("mxfp8"),
    "nvfp4 to nearest": NEAREST,
    "mxfp8, wgrad in bf16": Microscaling("mxfp8", wgrad="bf16"),
    "nvfp4, wgrad in bf16": Microscaling("nvfp4", wgrad="bf16", stochastic=False),
}
BOTH = pytest.mark.parametrize("form", ["mxfp8", "nvfp4"])


class Through:
    """Matrices of one expert in fp64, after their quantization."""

    def __init__(self, recipe: Microscaling) -> None:
        self.form, self.recipe = recipe.format, recipe

    def rows(self, x: Tensor, parts: int = 1, gradient: bool = False) -> Tensor:
        if self.form == "mxfp8":
            return mxfp8.dequantize(mxfp8.quantize(x.float(), parts), parts).double()
        random = gradient and self.recipe.stochastic
        q = nvfp4.quantize_rows(x.float(), self._all(x), parts, stochastic=random)
        return nvfp4.values_of_rows(q, parts).double() * q.amax.double() / 2688

    def weights(self, w_OI: Tensor, parts: int = 1, parts_in: int = 1) -> Tensor:
        if self.form == "mxfp8":
            return mxfp8.dequantize(mxfp8.quantize(w_OI.float(), parts_in), parts_in).double()
        q = nvfp4.quantize_weights(w_OI[None].float(), parts, parts_in)
        return nvfp4.values_of_weights(q, parts, parts_in)[0].double() * q.amax.double() / 2688

    def product(self, d: Tensor, v: Tensor) -> Tensor:
        """d^T v, of a gradient and another, contracted over rows."""
        if self.recipe.wgrad == "bf16":
            return d.T @ v
        if self.form == "mxfp8":
            given = (mxfp8.quantize_columns(x.float(), self._all(x)) for x in (d, v))
            d_CT, v_CT = (mxfp8.dequantize(q).double() for q in given)
            return d_CT @ v_CT.T
        random = self.recipe.stochastic
        of_d = nvfp4.quantize_columns(d.float(), self._all(d), stochastic=random)
        of_v = nvfp4.quantize_columns(v.float(), self._all(v))
        d_CT, v_CT = (
            nvfp4.values_of_rows(q).double() * q.amax.double() / 2688 for q in (of_d, of_v)
        )
        return d_CT @ v_CT.T

    def _all(self, x: Tensor) -> Tensor:
        return torch.tensor([0, len(x)], dtype=torch.int32)


def statement(p: Problem, recipe: Microscaling, parts: int | None = None) -> Result:
    """Output and gradients of the recipe by fp64 products of what was quantized."""
    parts, q = parts or (2 if p.act.gated else 1), Through(recipe)
    into_bf16 = lambda t: t.bfloat16().double()  # noqa: E731
    x, dout = p.x.double(), p.dout.double()
    made = {k: torch.zeros(v.shape, dtype=torch.float64) for k, v in leaves_of(p).items()}
    out, ends = torch.zeros_like(x), p.offsets.tolist()
    for e, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            continue
        index, prob = p.index[begin:end].long(), p.prob[begin:end, None].double()
        w1, w2 = q.weights(p.w1[e], parts), q.weights(p.w2[e])
        b1, b2 = (0.0 if b is None else b[e].double() for b in (p.b1, p.b2))
        h = into_bf16(q.rows(x[index]) @ w1.T + b1).requires_grad_()
        a = into_bf16(formula(h.detach(), p.act) * prob)
        out.index_add_(0, index, into_bf16(q.rows(a) @ w2.T + b2 * prob))
        value = formula(h, p.act)
        da = q.rows(dout[index], gradient=True) @ q.weights(p.w2[e].T).T
        made["prob"][begin:end] = (da * value.detach()).sum(1) + (dout[index] * b2).sum(1)
        (dh,) = torch.autograd.grad(value, h, da * prob)
        dh = into_bf16(dh)
        across = q.weights(p.w1[e].T, 1, parts).T
        made["x"].index_add_(0, index, into_bf16(q.rows(dh, parts, gradient=True) @ across))
        made["w2"][e] = q.product(dout[index], a)
        made["w1"][e] = q.product(dh, x[index])
        if p.b1 is not None:
            made["b1"][e] = dh.sum(0)
            made["b2"][e] = (dout[index] * prob).sum(0)
    return {"out": out} | {f"d{k}": v for k, v in made.items()}


@pytest.mark.parametrize(("backend", "allowed"), [("reference", 6e-3), ("torch", 1.8e-2)])
@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_the_format(name, backend, allowed):
    p, recipe = partial_blocks(bias=backend == "reference"), RECIPES[name]
    got, want, exact = run(p, backend, recipe=recipe), statement(p, recipe), run(p, "torch")
    coarse = 2.5 if recipe.format == "nvfp4" and backend == "torch" else 1
    for k in want:
        assert error(got[k], want[k]) < allowed * coarse, k
        if k != "db2":  # of which nothing is quantized
            assert error(exact[k], want[k]) > 1.5 * allowed * coarse, k


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4 to nearest"])
@pytest.mark.parametrize("act", [Activation("squared_relu"), Activation("quick_geglu", limit=0.7)])
def test_activations_with_and_without_a_gate(act, name):
    p = partial_blocks(act)
    got, want = run(p, "reference", recipe=RECIPES[name]), statement(p, RECIPES[name])
    assert {k: error(got[k], want[k]) < 8e-3 for k in want} == dict.fromkeys(want, True)


def test_stochastic_rounding_is_of_gradients():
    """Results before the gradient of h have the statement's bits, which determine its rounding."""
    p = partial_blocks()
    recipe = Microscaling("nvfp4")
    got, want = run(p, "reference", recipe=recipe), statement(p, recipe)
    to_nearest, exact = run(p, "reference", recipe=NEAREST), run(p, "torch")
    assert torch.equal(got["out"], to_nearest["out"])
    for k in ("out", "dprob", "dw2", "db1", "db2"):
        assert error(got[k], want[k]) < 6e-3, k
    for k in ("dx", "dw1", "dw2"):
        assert 0.02 < error(got[k], to_nearest[k]) < 0.3, k
        assert error(got[k], exact[k]) < 0.3, k


@BOTH
def test_gate_and_linear_half_have_blocks_of_their_own(form):
    """136 channels are no whole blocks: in one across the halves the gate's weights would be 0."""
    p = partial_blocks(bias=False)
    w1 = p.w1.clone()
    w1[:, :136] *= 2**-16
    p, recipe = replace(p, w1=w1), Microscaling(form, stochastic=False)
    got, want = run(p, "reference", recipe=recipe), statement(p, recipe)
    assert error(got["dx"], want["dx"]) < 8e-3 and error(got["dw1"], want["dw1"]) < 8e-3
    assert error(got["dx"], statement(p, recipe, parts=1)["dx"]) > 0.03


@BOTH
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_infinity_and_a_nan_are_not_lost(bad, form):
    p = partial_blocks()
    x = p.x.clone()
    x[7, 3] = bad
    got = run(replace(p, x=x), "torch", recipe=Microscaling(form))
    mine = (p.index[: p.offsets[-1]] == 7).nonzero().flatten()
    assert len(mine) and got["out"][7].isnan().all()
    experts = set(torch.searchsorted(p.offsets, mine, right=True).tolist())
    others = [n for n in range(300) if n != 7]
    with_it = torch.zeros(300, dtype=torch.bool)
    for e in experts:
        with_it[p.index[p.offsets[e - 1] : p.offsets[e]].long()] = True
    reached = with_it if form == "nvfp4" else torch.zeros(300, dtype=torch.bool)
    assert torch.equal(got["out"].isnan().any(1)[others], reached[others])


@BOTH
@pytest.mark.parametrize("save_unquantized", [False, True])
def test_a_dense_linear_layer(form, save_unquantized):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, 200, generator=g).bfloat16().requires_grad_() for s in (90, 72))
    dy = torch.randn(90, 72, generator=g).bfloat16()
    recipe = Microscaling(form)
    spec = MLPSpec(SWIGLU, "reference", recipe=recipe, save_unquantized=save_unquantized)
    dense_linear(x, w, None, spec).backward(dy)
    q = Through(recipe)
    y = dense_linear(x.detach(), w.detach(), None, spec)
    assert error(y, q.rows(x.detach()) @ q.weights(w.detach()).T) < 3e-3
    dx = q.rows(dy, gradient=True) @ q.weights(w.detach().T).T
    assert error(x.grad, dx) < 3e-3
    assert error(w.grad, q.product(dy.double(), x.detach().double())) < 3e-3


def test_the_fused_backend_has_neither():
    with pytest.raises(ValueError, match="kernels.backend=fused has no nvfp4: use kernels=torch"):
        provider("fused", recipe=Microscaling("nvfp4"))
