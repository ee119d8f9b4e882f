"""The fused backend as an adapter: every argument reaches its kernel, on stand-ins for them.

The stand-ins take the arguments of the real functions, whose signatures are compared from their
source, and compute with the reference in fp32; rows of the padding are NaN, as nobody writes them.
"""

import ast
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.calls import (
    BiasGradCall,
    Fc1Call,
    Fc2DgradCall,
    Linear,
    Operand,
    Rows,
    RowsCall,
    WgradCall,
)
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan, PlanSize, gather_pairs, sort_pairs
from phalanx.kernels.expert_mlp.fp8 import in_dtype
from phalanx.kernels.expert_mlp.main_grad import Buffer
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec, MLPWeights
from phalanx.kernels.expert_mlp.reference import Reference
from phalanx.kernels.routing.plan import make_plan
from phalanx.kernels.sm90.experts import backend
from tests.kernels.problems import (
    error,
    forward,
    gradients,
    leaves_of,
    make,
    one_expert,
    random_choice,
    run,
    two_micro_batches,
)

ACT = Activation("quick_geglu", limit=0.7, offset=1.0)
TILES = 3
reference = Reference()
launches: list[tuple[str, int]] = []


def written(out: Tensor | None, made: Tensor, offsets: Tensor, dim: int = 0) -> Tensor:
    """Output of a launch for the experts of `offsets`, into `out` if it is given."""
    if out is None:
        return made
    begin, end = int(offsets[0]), int(offsets[-1])
    out.narrow(dim, begin, end - begin).copy_(made.narrow(dim, begin, end - begin))
    return out


def plan_of(offsets: Tensor, index: Tensor | None = None, prob: Tensor | None = None) -> ExpertPlan:
    return ExpertPlan(index, prob, offsets, None)


WORDS = torch.zeros(6, dtype=torch.int64)
"""Words that kernels wait with before they read weights that may be on their way."""


def _check_waiting(ready: Tensor | None, out: Any) -> None:
    if out is not None and ready is not None:
        assert ready is WORDS, "rows have come before it is the turn of other experts"
        launches.append("ready")


class Kernels:
    """Stand-ins, each a static method called like the function, in a class called like its file."""

    class plan:
        @staticmethod
        def plan(topk_idx_NK, topk_prob_NK, *, first_expert, local_experts, rows):
            size = PlanSize(first_expert, local_experts, rows)
            made = sort_pairs(topk_idx_NK, topk_prob_NK, size)
            order = made.offsets.diff().sort(descending=True, stable=True).indices
            return made._replace(order_L=order.int())

        @staticmethod
        def plan_backward(dprob_S, inverse_NK):
            return gather_pairs(dprob_S, inverse_NK)

    class fc1_act:
        @staticmethod
        def fc1_act(
            x,
            w1_LHD,
            offsets,
            act,
            *,
            index_S,
            prob_S,
            bias_LH,
            keep_h,
            ready,
            out,
            options,
        ):
            launches.append(("fc1_act", options.sm_margin))
            _check_waiting(ready, out)
            plan = plan_of(offsets, index_S, prob_S)
            h, a = reference.fc1_act(Fc1Call(x, Linear(w1_LHD, bias_LH), plan, act, keep_h))
            to_h, to_a = out or (None, None)
            return None if h is None else written(to_h, h, offsets), written(to_a, a, offsets)

    class grouped_gemm:
        @staticmethod
        def grouped_gemm(a, w_LNK, offsets, *, parts, bias_LN, scale_S, out_SN, options, signal):
            assert parts == 1
            assert (bias_LN is None) == (scale_S is None)
            assert signal is None or out_SN is None, "own experts alone signal"
            launches.append(("grouped_gemm", options.sm_margin))
            plan = plan_of(offsets, None, scale_S)
            y = reference.rows(RowsCall(a, Linear(w_LNK, bias_LN), plan))
            made = written(out_SN, y, offsets)
            if signal is not None:
                signal.out_SN = made
            return made

    class fc2_dgrad_dact:
        @staticmethod
        def fc2_dgrad_dact(dy, w2_LFD, h_SH, offsets, act, *, index_S, prob_S, ready, out, options):
            launches.append(("fc2_dgrad_dact", options.sm_margin))
            _check_waiting(ready, out)
            to_dh, to_a, to_parts = out or (None, None, None)
            plan, operand = plan_of(offsets, index_S, prob_S), Operand(dy, index_S is not None)
            call = Fc2DgradCall(operand, Linear(w2_LFD.mT), h_SH, plan, act)
            dh, a, dprob, *_ = reference.fc2_dgrad_dact(call)
            dh, a = written(to_dh, dh, offsets), written(to_a, a, offsets)
            if dprob is None:
                return dh, a, None
            parts = torch.stack([dprob / TILES] * TILES)
            parts[:, int(offsets[-1]) :] = float("nan")
            return dh, a, written(to_parts, parts, offsets, 1)

        @staticmethod
        def dprob(partial_CS, offsets, *, table_NL, index_S):
            used = int(offsets[-1])
            out = torch.zeros(partial_CS.shape[1])
            out[:used] = partial_CS[:, :used].sum(0)
            if table_NL is not None:
                expert = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
                row = torch.arange(used) if index_S is None else index_S[:used].long()
                out[:used] += table_NL[row, expert]
            return out

    class wgrad:
        @staticmethod
        def wgrad(
            d,
            v,
            offsets,
            *,
            index_S,
            out_LOI,
            accumulate,
            zeros,
            order_L,
            options,
        ):
            assert not (d.gather and v.gather) and (index_S is not None) == (d.gather or v.gather)
            launches.append(("wgrad", options.sm_margin))
            if order_L is not None:
                assert sorted(order_L.tolist()) == list(range(len(offsets) - 1))
            into = None if out_LOI is None else Buffer(out_LOI, accumulate)
            made = reference.wgrad(WgradCall(d, v, plan_of(offsets, index_S), into))
            if not zeros:
                made[offsets.diff() == 0] = torch.nan
            return made

        @staticmethod
        def wgrad_pair(first, second, out_LOI, *, accumulate, zeros, order_L, options):
            assert zeros and order_L is None
            launches.append(("wgrad_pair", options.sm_margin))
            into = Buffer(out_LOI, accumulate)
            calls = [
                WgradCall(d, v, plan_of(offsets, index_S), into)
                for d, v, offsets, index_S in (first, second)
            ]
            return reference.wgrad_pair(*calls)

    class bias_grad:
        @staticmethod
        def bias_grad(d, offsets, *, parts, scale_S, index_S, out_LO, dtype, accumulate, behind):
            assert dtype == torch.float32 and (behind or not offsets[0])
            d = in_dtype(Operand(d, parts=parts), torch.bfloat16)
            plan, operand = plan_of(offsets, index_S, scale_S), Operand(d, index_S is not None)
            into = None if out_LO is None else Buffer(out_LO, accumulate)
            return reference.bias_grad(BiasGradCall(operand, plan, scale_S is not None, into))

    class combine:
        @staticmethod
        def combine(y_SD, inverse_NK, *, addends=()):
            return reference.combine(y_SD, inverse_NK, addends)


FILES = {name: part for name, part in vars(Kernels).items() if isinstance(part, type)}
ROOMS = dict.fromkeys(FILES, "experts") | {"plan": "routing", "wgrad": "wgrad"}


def bias_products(dy: Rows, b2: Tensor) -> Tensor:
    values = in_dtype(Operand(dy), torch.bfloat16)
    return values.float() @ b2.float().T


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, *functions: Callable[..., Any]) -> None:
    """Let a module of `kernels.sm90` have these functions alone."""
    module = ModuleType(f"phalanx.kernels.sm90.{name}")
    vars(module).update({function.__name__: function for function in functions})
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, part in FILES.items():
        functions = [getattr(part, k) for k in vars(part) if k[0] != "_"]
        stand_in(monkeypatch, f"{ROOMS[name]}.{name}", *functions)
    stand_in(monkeypatch, "experts.bias_products_triton", bias_products)
    launches.clear()


@pytest.mark.parametrize("file", FILES)
def test_stand_ins_take_what_the_functions_take(file: str) -> None:
    page = Path(backend.__file__).parents[1] / ROOMS[file] / f"{file}.py"
    functions = {
        node.name: node.args
        for node in ast.parse(page.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for name, fake in vars(FILES[file]).items():
        if name.startswith("_"):
            continue
        real, ours = functions[name], inspect.signature(fake.__func__).parameters.values()
        positional = [a.arg for a in real.args]
        given = [p.name for p in ours if p.kind == p.POSITIONAL_OR_KEYWORD]
        assert positional[: len(given)] == given
        assert len(real.args) - len(real.defaults) <= len(given)
        known = {a.arg for a in real.kwonlyargs}
        assert {p.name for p in ours if p.kind == p.KEYWORD_ONLY} <= known
        needed = [a.arg for a, d in zip(real.kwonlyargs, real.kw_defaults, strict=True) if not d]
        assert set(needed) <= {p.name for p in ours}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_reference(bias: bool, split: bool) -> None:
    choice = random_choice(40, 3, [0, 2, 3])
    p = make(ACT, torch.float32, bias=bias, choice=choice, rows=160)
    used = int(p.offsets[-1])
    garbage = p.index.clone()
    garbage[used:] = 2**30
    ours = run(replace(p, index=garbage), "fused", split=split)
    expected = run(p, "reference", split=split)
    for name in expected:
        assert error(ours[name], expected[name]) < 1e-6, name
    assert not ours["dprob"][used:].any()


def test_poison_in_the_padding_of_rows() -> None:
    p = make(ACT, torch.float32, rows=160)
    ours, expected = run(p, "fused", poison=True), run(p, "reference")
    for name in expected:
        assert error(ours[name], expected[name]) < 1e-6, name


def test_each_pass_has_its_margin() -> None:
    p = make(ACT, torch.float32)
    leaves = leaves_of(p)
    out = forward(p, leaves, "fused", margins=Margins(8, 16, 24))
    assert launches == [("fc1_act", 8), ("grouped_gemm", 8)]
    launches.clear()
    gradients(out, p.dout, leaves)
    expected = [("fc2_dgrad_dact", 16), ("grouped_gemm", 16), ("wgrad", 24), ("wgrad", 24)]
    assert launches == expected


def test_plan_is_that_of_the_other_backends_and_has_an_order() -> None:
    idx, prob = torch.randint(-1, 8, (50, 3)).int(), torch.rand(50, 3)
    plans: dict[str, Any] = {}
    for name in ("torch", "fused"):
        leaf = prob.clone().requires_grad_()
        made = make_plan(idx, leaf, first_expert=2, local_experts=4, rows=64, backend=name)
        made.row_prob_S.backward(torch.arange(64.0))
        plans[name] = (*made[:5], leaf.grad)
    for ours, theirs in zip(plans["fused"], plans["torch"], strict=True):
        assert torch.equal(ours, theirs)
    assert made.order_L is not None and made.order_L.shape == (4,)


def test_order_reaches_the_weight_gradients() -> None:
    p = make(ACT, torch.float32)
    leaves = leaves_of(p)
    out = forward(p, leaves, "fused", order_L=torch.tensor([2, 0, 3, 1]).int())
    ours = gradients(out, p.dout, leaves)
    assert error(ours["dw1"], run(p, "reference")["dw1"]) < 1e-6


def test_buffers_take_gradients() -> None:
    p = make(ACT, torch.float32)
    leaves, expected = leaves_of(p), run(p, "reference")
    for name in ("w1", "w2", "b1", "b2"):
        leaves[name].main_grad = torch.ones(leaves[name].shape)
    forward(p, leaves, "fused", accumulate=True).backward(p.dout)
    for name in ("w1", "w2", "b1", "b2"):
        want = expected[f"d{name}"] + 1
        torch.testing.assert_close(leaves[name].main_grad, want, rtol=1e-5, atol=1e-5)


def test_two_micro_batches_have_one_launch_for_each_weight() -> None:
    """Their sums, of rows and an index of their own, are added to what is in the buffers."""
    first, second = (
        make(ACT, torch.float32, choice=random_choice(40, 3, experts)) for experts in ([0, 2], [1])
    )
    second = replace(second, **{name: getattr(first, name) for name in ("w1", "w2", "b1", "b2")})
    ours = two_micro_batches([first, second], "fused", margins=Margins(8, 16, 24))
    names = [name for name, _ in launches]
    assert launches.count(("wgrad_pair", 24)) == 2 and "wgrad" not in names
    of_first, of_second = (run(p, "reference") for p in (first, second))
    for name, sums in ours.items():
        want = 1 + of_first[f"d{name}"] + of_second[f"d{name}"]
        torch.testing.assert_close(sums, want, rtol=1e-5, atol=1e-5)
    launches.clear()
    two_micro_batches([first, second, first], "fused")
    names = [name for name, _ in launches]
    assert names.count("wgrad_pair") == names.count("wgrad") == 2


@pytest.mark.parametrize("bias", [False, True])
def test_dense_layers_are_one_group(bias: bool) -> None:
    x, w1, w2 = torch.randn(9, 32), torch.randn(48, 32), torch.randn(32, 24)
    b1, b2 = (torch.randn(48), torch.randn(32)) if bias else (None, None)
    leaves = [t.requires_grad_() for t in (x, w1, w2, b1, b2) if t is not None]
    results = []
    for name in ("reference", "fused"):
        out = one_expert(x, MLPWeights(w1, w2, b1, b2), MLPSpec(ACT, name))
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for theirs, ours in zip(*results, strict=True):
        assert error(ours, theirs) < 1e-6


def test_without_gradients_h_is_not_written() -> None:
    p = make(ACT, torch.float32)
    with torch.no_grad():
        out = forward(p, leaves_of(p), "fused")
    assert error(out, run(p, "reference")["out"]) < 1e-6
