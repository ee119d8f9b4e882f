"""The fused kernels in FP8 as a backend, on stand-ins that compute what the kernels promise.

Each stand-in takes the arguments of its function, whose signature is compared, makes plain values
of what is FP8, computes with the reference and quantises what the kernel leaves in FP8.
"""

import inspect
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.expert_mlp import fp8
from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.calls import (
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.dense_mlp import dense_fc1, dense_fc2, dense_linear
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.main_grad import Buffer, facts_of
from phalanx.kernels.expert_mlp.mlp_spec import MLPSpec
from phalanx.kernels.expert_mlp.reference import Reference
from phalanx.kernels.quantize.blocks import (
    Quantized,
    dequantize_columns,
    dequantize_rows,
    dequantize_weights,
    quantize_rows,
)
from phalanx.kernels.quantize.recipe import Fp8Block
from tests.kernels.problems import (
    error,
    forward,
    gradients,
    leaves_of,
    make,
    random_choice,
    two_micro_batches,
)
from tests.kernels.sm90.experts.test_backend import Kernels, bias_products, stand_in, written

reference = Reference()


def written_fp8(out: Quantized | None, made: Quantized, offsets: Tensor) -> Quantized:
    if out is not None:
        for to, of in zip(out, made, strict=True):
            written(to.view(of.dtype), of, offsets)
    return out or made


def fc1_act(x, w1_LHD, offsets, act, *, index_S, prob_S, bias_LH, keep_h, ready, out, options):
    plan = ExpertPlan(index_S, prob_S, offsets, None)
    values = dequantize_weights(w1_LHD, act.facts.halves)
    given = dequantize_rows(x).bfloat16(), Linear(values.bfloat16(), bias_LH)
    h, a = reference.fc1_act(Fc1Call(*given, plan, act))
    to_h, to_a = out or (None, None)
    a = written_fp8(to_a, quantize_rows(a), offsets)
    return written(to_h, h, offsets) if keep_h else None, a


def grouped_gemm(a, w_LNK, offsets, *, parts, bias_LN, scale_S, out_SN, signal, options):
    plan = ExpertPlan(None, scale_S, offsets, None)
    values = dequantize_weights(type(w_LNK)(w_LNK.data.mT, w_LNK.scale.mT), parts).mT
    given = dequantize_rows(a, parts).bfloat16(), Linear(values.bfloat16(), bias_LN)
    return written(out_SN, reference.rows(RowsCall(*given, plan)), offsets)


def fc2_dgrad_dact(dy, w2_LFD, h_SH, offsets, act, *, index_S, prob_S, ready, out, options):
    plan = ExpertPlan(index_S, prob_S, offsets, None)
    values = dequantize_weights(w2_LFD).bfloat16().mT
    given = Operand(dequantize_rows(dy).bfloat16(), index_S is not None), Linear(values), h_SH
    dh, a, dprob, *_ = reference.fc2_dgrad_dact(Fc2DgradCall(*given, plan, act))
    to_dh, to_a, to_parts = out or (None, None, None)
    dh = written_fp8(to_dh, quantize_rows(dh, act.facts.halves, dy.data.dtype), offsets)
    a = written_fp8(to_a, quantize_rows(a), offsets)
    return dh, a, None if dprob is None else written(to_parts, dprob[None], offsets, 1)


def wgrad(d, v, offsets, *, index_S=None, out_LOI, accumulate, zeros, order_L, options):
    assert index_S is None
    T = d.matrix.data_CT.shape[1]
    all_T = torch.tensor([0, T], dtype=torch.int32)  # experts begin at whole blocks
    operands = (Operand(dequantize_columns(x.matrix, all_T, T, x.parts).bfloat16()) for x in (d, v))
    plan = ExpertPlan(None, None, offsets, None)
    into = None if out_LOI is None else Buffer(out_LOI, accumulate)
    made = reference.wgrad(WgradCall(*operands, plan, into))
    if not zeros:
        made[offsets.diff() == 0] = torch.nan
    return made


def wgrad_pair(first, second, out_LOI, *, accumulate, zeros, order_L, options):
    paired.append(1)
    into = dict(out_LOI=out_LOI, zeros=zeros, order_L=order_L, options=options)
    for add, (d, v, offsets, index_S) in ((accumulate, first), (True, second)):
        wgrad(d, v, offsets, index_S=index_S, accumulate=add, **into)
    return out_LOI


paired: list[int] = []
STAND_INS = {
    "experts.fc1_act": fc1_act,
    "experts.grouped_gemm": grouped_gemm,
    "experts.fc2_dgrad_dact": fc2_dgrad_dact,
    "wgrad.wgrad": wgrad,
    "wgrad.wgrad_pair": wgrad_pair,
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "signature" not in request.node.name:
        stand_in(monkeypatch, "experts.bias_grad", Kernels.bias_grad.bias_grad)
        stand_in(monkeypatch, "experts.combine", Kernels.combine.combine)
        stand_in(monkeypatch, "experts.fc1_act", fc1_act)
        stand_in(monkeypatch, "experts.grouped_gemm", grouped_gemm)
        dprob = Kernels.fc2_dgrad_dact.dprob
        stand_in(monkeypatch, "experts.fc2_dgrad_dact", fc2_dgrad_dact, dprob)
        stand_in(monkeypatch, "wgrad.wgrad", wgrad, wgrad_pair)
        stand_in(monkeypatch, "experts.bias_products_triton", bias_products)


@pytest.mark.parametrize("name", STAND_INS)
def test_signature_of_a_stand_in_is_the_functions(name: str) -> None:
    function = STAND_INS[name]
    real = inspect.signature(
        getattr(
            import_module(f"phalanx.kernels.sm90.{name.removesuffix('_pair')}"),
            function.__name__,
        )
    ).parameters
    ours = inspect.signature(function).parameters
    assert set(ours) <= set(real)
    needed = [p.name for p in real.values() if p.default is p.empty]
    assert [p for p in ours if ours[p].kind != ours[p].KEYWORD_ONLY] == needed


RECIPES = [Fp8Block(), Fp8Block("e5m2", hidden="fp8")]


@pytest.mark.parametrize("act", [Activation("swiglu"), Activation("squared_relu")], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_equals_the_recipe_of_the_reference(recipe: Fp8Block, bias: bool, act: Activation) -> None:
    choice = random_choice(200, 2, [0, 1, 3])
    p = make(act, torch.bfloat16, bias=bias, choice=choice, L=4, D=192, width=160, rows=420)
    found = []
    for name in ("fused", "reference"):
        leaves = leaves_of(p)
        found.append(gradients(forward(p, leaves, name, recipe=recipe), p.dout, leaves))
    ours, expected = found
    for k in expected:
        assert error(ours[k], expected[k]) < 3e-3, k


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_two_micro_batches(recipe: Fp8Block) -> None:
    """Columns of each are padded by themselves."""
    paired.clear()
    act = Activation("swiglu")
    first, second = (
        make(
            *(act, torch.bfloat16),
            **dict(choice=random_choice(200, 2, experts), L=4, D=192, width=160, rows=420),
        )
        for experts in ([0, 1, 3], [1, 2])
    )
    second = replace(second, w1=first.w1, w2=first.w2)
    pairs = two_micro_batches([first, second], "fused", recipe=recipe)
    assert len(paired) == 2
    for p in (first, second):
        for name, alone in two_micro_batches([p], "fused", recipe=recipe).items():
            pairs[name] -= alone - 1
    for name, left in pairs.items():
        torch.testing.assert_close(left, torch.ones_like(left), rtol=0, atol=1e-3, msg=name)


def test_weight_gradients_in_bf16_are_refused() -> None:
    with pytest.raises(ValueError, match="fused has no precision.wgrad=bf16: use kernels=torch"):
        provider("fused", recipe=Fp8Block(wgrad="bf16"))


def copies_made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions that make copies, at each call."""
    made = []

    def counting(name: str) -> Any:
        quantize = getattr(fp8, name)
        return lambda *w, **how: made.append(name) or quantize(*w, **how)

    for name in ("quantize_weights", "quantize_layout"):
        monkeypatch.setattr(fp8, name, counting(name))
    return made


def test_copies_of_weights_are_made_once_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    made = copies_made(monkeypatch)

    def twice(keep: bool) -> list[dict[str, Tensor]]:
        p = make(Activation("swiglu"), torch.bfloat16, D=192, width=160)
        leaves = leaves_of(p)
        how = dict(recipe=Fp8Block(), keep_fp8=keep)
        results = []
        for _ in range(2):
            out = forward(p, leaves, "fused", **how)
            results.append(gradients(out, p.dout, leaves))
        fp8.forget(leaves.values())
        with torch.no_grad():
            leaves["w2"].mul_(2)
        results.append(gradients(forward(p, leaves, "fused", **how), p.dout, leaves))
        return results

    with_copies = twice(True)
    assert made == ["quantize_weights"] * 4  # of two matrices, before and after the change
    without = twice(False)
    assert made[4:] == ["quantize_layout"] * 12  # of each for every use
    for ours, theirs in zip(with_copies, without, strict=True):
        assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


def test_copies_are_found_where_saved_tensors_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As exchanges do that send tokens once more in the backward pass."""
    made = copies_made(monkeypatch)
    p = make(Activation("swiglu"), torch.bfloat16, D=192, width=160)
    leaves = leaves_of(p)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        out = forward(p, leaves, "fused", recipe=Fp8Block(), keep_fp8=True)
    gradients(out, p.dout, leaves)
    assert len(made) == 2

    shapes = (9, 64), (64, 64), (64, 32), (64, 64)
    x, w1, w2, w = (torch.randn(s).bfloat16().requires_grad_() for s in shapes)
    spec = MLPSpec(Activation("swiglu"), "fused", recipe=Fp8Block(), keep_fp8=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        y = dense_fc2(dense_fc1(x, w1, spec), w2, spec) + dense_linear(x, w, None, spec)
    y.sum().backward()
    assert len(made) == 5


def test_copies_of_a_dense_mlp_stay_with_its_parameters() -> None:
    x, w1, w2 = (torch.randn(s).bfloat16().requires_grad_() for s in ((9, 64), (64, 64), (64, 32)))
    spec = MLPSpec(Activation("swiglu"), "fused", recipe=Fp8Block(), keep_fp8=True)
    dense_fc2(dense_fc1(x, w1, spec), w2, spec).sum().backward()
    copies = [facts_of(w).fp8_copies for w in (w1, w2)]
    assert copies[0].data_LOI.shape == (1, 64, 64) and copies[1] is not None
    with fp8.within_a_step([x, w1, w2]):
        assert facts_of(w1).fp8_copies is facts_of(w2).fp8_copies is None
        dense_fc1(x, w1, spec)
        assert facts_of(w1).fp8_copies is not None
    assert facts_of(w1).fp8_copies is None
    spec = replace(spec, keep_fp8=False)
    dense_fc1(x, w1, spec)
    assert facts_of(w1).fp8_copies is None
