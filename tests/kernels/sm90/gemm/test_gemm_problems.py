"""Problems of the grouped GEMMs on a CPU: their checks take what torch makes, and nothing wrong."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("cutlass")

from phalanx.kernels.quantize.blocks import quantize_rows
from tests.kernels.problems import formula
from tests.kernels.sm90.fp8.fp8_problems import (
    FORMATS,
    Fp8DgradProblem,
    Fp8Fc1Problem,
    Fp8RowsProblem,
    exact_in_bf16,
)
from tests.kernels.sm90.gemm.gemm_problems import (
    DEVICE,
    FP64,
    GPT_OSS,
    SQUARED,
    UNTOUCHED,
    DgradProblem,
    Fc1Problem,
    Outputs,
    Problem,
    RowsProblem,
)
from tests.kernels.sm90.wgrad.wgrad_problems import MODES, Fp8WgradProblem, Pair, WgradProblem

COUNTS, SIZES = [3, 0, 70, 1], (192, 64)
PROBLEMS = {
    "rows": (RowsProblem, {}),
    "rows stored KN": (RowsProblem, dict(transposed=True)),
    "rows with a bias": (RowsProblem, dict(bias=True)),
    "fc1": (Fc1Problem, dict(bias=True)),
    "fc1 gathered": (Fc1Problem, dict(act=GPT_OSS, gather=True)),
    "dgrad": (DgradProblem, dict(act=SQUARED)),
    "dgrad gathered": (DgradProblem, dict(gather=True)),
    "dgrad without prob": (DgradProblem, dict(prob=False)),
    "rows in FP8": (Fp8RowsProblem, dict(bias=True)),
    "rows in two parts in FP8": (Fp8RowsProblem, dict(parts=2, transposed=True)),
    "fc1 in FP8": (Fp8Fc1Problem, dict(gather=True, bias=True)),
    "dgrad in FP8": (Fp8DgradProblem, dict(act=GPT_OSS)),
    "dgrad in e5m2": (Fp8DgradProblem, dict(dtype=FORMATS["e5m2"], gather=True)),
}


def right(p: Problem) -> Outputs:
    """Right results of a kernel, of the rows of experts."""
    if isinstance(p, Fp8RowsProblem):
        return {"y": exact_in_bf16(p.exact()["y"])}
    if isinstance(p, Fp8Fc1Problem):
        h = exact_in_bf16(p._h(FP64))
        a = quantize_rows(p._a(h.double()).to(torch.bfloat16))
        return {"h": h, "a": a.data.view(torch.uint8), "a_scale": a.scale}
    if isinstance(p, Fp8DgradProblem):
        exact = {name: t.to(torch.bfloat16) for name, t in p.bf16().exact().items()}
        dh, a = quantize_rows(exact["dh"], p.num_gate_parts, p.dtype), quantize_rows(exact["a"])
        da = p.product(p.dense, p.w_LNK, FP64)
        terms = (da * formula(p.h[: p.used].double(), p.act)).float()
        made = {"dh": dh.data.view(torch.uint8), "dh_scale": dh.scale, "parts": terms}
        return {**made, "a": a.data.view(torch.uint8), "a_scale": a.scale}
    return p.plain()


def padded(p: Problem, rows: Outputs, value: float = UNTOUCHED) -> Outputs:
    formats = getattr(p, "formats", {})

    def pad(name: str, t: Tensor) -> Tensor:
        dtype = formats.get(name, t.dtype) if t.dtype == torch.uint8 else t.dtype
        padding = torch.full((p.S - p.used, *t.shape[1:]), value, device=DEVICE).to(dtype)
        return torch.cat([t, padding.view(t.dtype)])

    return {name: pad(name, t) for name, t in rows.items()}


@pytest.mark.parametrize("name", PROBLEMS)
def test_checks_of_rows(name):
    kind, options = PROBLEMS[name]
    p = kind(COUNTS, *SIZES, **options)
    made = right(p)
    p.check(padded(p, made))
    for first in [n for n in p.written if n in made and n != "parts" and "scale" not in n]:
        other = made[first].clone()
        other[:3] = made[first][3:6]  # rows of another expert
        with pytest.raises(AssertionError):
            p.check(padded(p, {**made, first: other}))
    with pytest.raises(AssertionError):
        p.check(padded(p, made, 0.0))


@pytest.mark.parametrize("kind", [RowsProblem, Fc1Problem, DgradProblem])
def test_exact_checks_of_integers(kind):
    p = kind(COUNTS, *SIZES, integers=True, gather=kind is not RowsProblem)
    names = {RowsProblem: ["y"], Fc1Problem: ["h"], DgradProblem: ["dh", "a"]}[kind]
    made = {name: exact_in_bf16(t) for name, t in p.exact().items() if name in names}
    p.check_exact(padded(p, made), *names)
    for name in names:
        other = made[name].clone()
        other[-1, -1] += 1
        with pytest.raises(AssertionError):
            p.check_exact(padded(p, {**made, name: other}), name)


@pytest.mark.parametrize("kind", [RowsProblem, Fc1Problem, DgradProblem, Fp8RowsProblem])
def test_poisoned_rows_are_those_of_one_expert(kind):
    p = kind([4, 3, 2], *SIZES)
    p.poison(slice(4, 7))
    for name in p.reads:
        t = getattr(p, name)
        bad = (t if isinstance(t, Tensor) else t.scale).isnan().view(p.S, -1).any(1)
        assert bad[:9].tolist() == [False] * 4 + [True] * 3 + [False] * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("gathered", [None, "d", "v"])
def test_checks_of_weight_gradients(mode, gathered):
    p = WgradProblem(COUNTS, *SIZES, gathered=gathered, before=2)
    made = p.exact(mode).to(MODES[mode][0])
    p.check_made(mode, made)
    for expert in range(4):
        other = made.clone()
        other[expert] = made[(expert + 1) % 4]
        with pytest.raises(AssertionError):
            p.check_made(mode, other)


@pytest.mark.parametrize("at", [0, -1])
def test_a_result_that_spreads_is_an_error(at):
    p = WgradProblem(COUNTS, *SIZES)

    def call(out: Tensor, add: bool) -> Tensor:
        out.zero_()
        storage = torch.empty(0, dtype=out.dtype, device=DEVICE).set_(out.untyped_storage())
        storage[at] = 0
        return out

    with pytest.raises(AssertionError):
        p.within_guards("fp32", None, call)


@pytest.mark.parametrize("integers", [False, True])
def test_weight_gradients_in_fp8_are_those_of_their_values(integers):
    p = Fp8WgradProblem(COUNTS, 256, 128, parts=2, integers=integers)
    exact = p.exact("fp32 +=")
    assert exact.shape == (4, 256, 128) and exact.isfinite().all()
    assert torch.equal(exact[1], p.start()[1].double())
    both = Pair(Fp8WgradProblem, (COUNTS, [0, 5, 0, 0]), 256, 128, parts=2, integers=integers)
    assert torch.equal(both.exact("fp32 +=")[[0, 2, 3]], exact[[0, 2, 3]])
    assert not torch.equal(both.exact("fp32 +=")[1], exact[1])
