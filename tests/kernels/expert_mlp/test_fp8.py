"""The FP8 recipe of the expert MLP, against its own statement in fp64, and what it saves.

The statement walks over experts in fp64, rounds to bf16 and FP8 where the recipe does, and shares
nothing with the backends but the definition of a block. Two bf16 computations of the recipe differ
by roundings that fall either way; a GEMM that missed a quantisation differs by its error of 3 %.
`torch` rounds more often (h before its bias is added, the gradient of a), which may move an FP8
number to its neighbour: it is compared without biases and less closely.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.quantize import blocks
from phalanx.kernels.quantize.recipe import FORMATS, Fp8Block
from tests.kernels.problems import (
    Problem,
    Result,
    error,
    formula,
    forward,
    leaves_of,
    partial_blocks,
    run,
)

RECIPES = {
    "default": Fp8Block(),
    "wgrad in bf16": Fp8Block(wgrad="bf16"),
    "e5m2": Fp8Block(grad_format="e5m2"),
    "hidden in fp8": Fp8Block(hidden="fp8"),
}


def rows(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, parts: int = 1) -> Tensor:
    return blocks.dequantize_rows(blocks.quantize_rows(x.float(), parts, dtype), parts).double()


def weights(w_OI: Tensor, parts: int = 1) -> Tensor:
    q = blocks.quantize_weights(w_OI[None].float(), parts)
    return blocks.dequantize_weights(q.forward, parts)[0].double()


def columns(x: Tensor, dtype: torch.dtype, parts: int = 1) -> Tensor:
    offsets = torch.tensor([0, len(x)], dtype=torch.int32)
    q = blocks.quantize_columns(x.float(), offsets, parts, dtype)
    return blocks.dequantize_columns(q, offsets, len(x), parts).double()


def statement(p: Problem, recipe: Fp8Block) -> Result:
    """Output and gradients of the recipe by fp64 products of what is FP8."""
    grad, act_type = FORMATS[recipe.grad_format], torch.float8_e4m3fn
    parts = 2 if p.act.gated else 1
    into_bf16 = lambda t: t.bfloat16().double()  # noqa: E731
    of_wgrad = {
        "bf16": lambda t, dtype, parts=1: t,
        "fp8": lambda t, dtype, parts=1: columns(t, dtype, parts),
    }[recipe.wgrad]
    x, dout = p.x.double(), p.dout.double()
    made = {k: torch.zeros(v.shape, dtype=torch.float64) for k, v in leaves_of(p).items()}
    out, ends = torch.zeros_like(x), p.offsets.tolist()
    for e, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin == end:
            continue
        index, prob = p.index[begin:end].long(), p.prob[begin:end, None].double()
        w1, w2 = weights(p.w1[e], parts), weights(p.w2[e])
        xq, dq = rows(x[index]), rows(dout[index], grad)
        b1, b2 = (0.0 if b is None else b[e].double() for b in (p.b1, p.b2))
        h = into_bf16(xq @ w1.T + b1)
        y = into_bf16(rows(into_bf16(formula(h, p.act) * prob)) @ w2.T + b2 * prob)
        out.index_add_(0, index, y)
        if recipe.hidden == "fp8":
            h = rows(h, act_type, parts)
        h.requires_grad_()
        value = formula(h, p.act)
        da = dq @ w2
        made["prob"][begin:end] = (da * value.detach()).sum(1) + (dq * b2).sum(1)
        (dh,) = torch.autograd.grad(value, h, da * prob)
        dh, a = into_bf16(dh), into_bf16(value.detach() * prob)
        dhq = rows(dh, grad, parts)
        made["x"].index_add_(0, index, into_bf16(dhq @ w1))
        plain = recipe.wgrad == "bf16"
        made["w2"][e] = of_wgrad(dout[index] if plain else dq, grad).T @ of_wgrad(a, act_type)
        made["w1"][e] = of_wgrad(dh, grad, parts).T @ of_wgrad(x[index] if plain else xq, act_type)
        if p.b1 is not None:
            made["b1"][e] = dhq.sum(0)
            made["b2"][e] = ((dout[index] if plain else dq) * prob).sum(0)
    return {"out": out} | {f"d{k}": v for k, v in made.items()}


@pytest.mark.parametrize(("backend", "allowed"), [("reference", 6e-3), ("torch", 1.8e-2)])
@pytest.mark.parametrize("name", RECIPES)
def test_products_are_those_of_fp8(name, backend, allowed):
    p = partial_blocks(bias=backend == "reference")
    got, want, exact = (
        run(p, backend, recipe=RECIPES[name]),
        statement(p, RECIPES[name]),
        run(p, "torch"),
    )
    for k in want:
        assert error(got[k], want[k]) < allowed, k
        if not (name == "wgrad in bf16" and k == "db2"):  # whose operands are in bf16
            assert error(exact[k], want[k]) > 1.5 * allowed, k


@pytest.mark.parametrize("act", [Activation("squared_relu"), Activation("quick_geglu", limit=0.7)])
def test_activations_with_and_without_a_gate(act):
    p = partial_blocks(act)
    got, want = run(p, "reference", recipe=RECIPES["default"]), statement(p, RECIPES["default"])
    assert {k: error(got[k], want[k]) < 8e-3 for k in want} == dict.fromkeys(want, True)


def test_gate_and_linear_half_have_blocks_of_their_own():
    """A gate a hundred times the linear half leaves that its precision."""
    p = partial_blocks()
    w1 = p.w1.clone()
    w1[:, :136] *= 100
    values = weights(w1[0], 2)
    assert error(values[136:], w1[0, 136:]) < 0.04
    got = run(replace(p, w1=w1), "reference", recipe=RECIPES["default"])
    want = statement(replace(p, w1=w1), RECIPES["default"])
    assert error(got["dw1"], want["dw1"]) < 8e-3


@pytest.mark.parametrize(("name", "of_x", "of_h"), [("default", 1, 2), ("hidden in fp8", 1, 1)])
def test_what_is_kept_for_the_backward_pass(name, of_x, of_h):
    """Bytes of an element of x and of h, and what their scales take."""
    p, kept = partial_blocks(), []
    leaves = leaves_of(p)
    seen = {t.data_ptr() for t in leaves.values()}

    def pack(t: Tensor) -> Tensor:
        if t.data_ptr() not in seen and t.dtype in (torch.bfloat16, torch.float8_e4m3fn):
            kept.append((tuple(t.shape), t.element_size()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward(p, leaves, "torch", recipe=RECIPES[name])
    assert sorted(kept) == sorted([((300, 168), of_x), ((620, 272), of_h)])


def test_an_infinity_and_a_nan_are_not_lost():
    for bad in (torch.inf, torch.nan):
        p = partial_blocks()
        x = p.x.clone()
        x[7, 3] = bad
        got = run(replace(p, x=x), "torch", recipe=RECIPES["default"])
        expected = 7 in p.index[: p.offsets[-1]]
        assert got["out"][7].isnan().all() == expected
        assert got["out"][:7].isfinite().all()
