"""The functions of experts as a user meets them, against every expert on every token in fp64."""

import doctest
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from phalanx.kernels import api
from phalanx.kernels.api import (
    Activation,
    Fp8Block,
    KernelUnavailable,
    Microscaling,
    grouped_experts,
    grouped_experts_sorted,
)
from phalanx.kernels.functional import experts
from tests.kernels.compiling import compiling
from tests.kernels.problems import error, formula
from tests.support.sync_free import sync_free

E, D, WIDTH, K = 6, 32, 24, 3
GPT_OSS = Activation("quick_geglu", limit=0.7, offset=1.0)


def weights(act: Activation, bias: bool = True, experts: int = E) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    H = act.width(WIDTH)
    shapes = dict(w1=(experts, H, D), w2=(experts, D, WIDTH))
    shapes |= dict(b1=(experts, H), b2=(experts, D)) if bias else {}
    return {n: torch.randn(s, generator=g) * s[-1] ** -0.5 for n, s in shapes.items()}


def routed(*lead: int, top_k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    prob, idx = torch.rand(*lead, E, generator=g).topk(top_k)
    return torch.randn(*lead, D, generator=g), idx, prob


def one_expert(x: Tensor, w: dict[str, Tensor], act: Activation, e: int) -> Tensor:
    h = F.linear(x, w["w1"][e], w["b1"][e] if "b1" in w else None)
    return F.linear(formula(h, act), w["w2"][e], w["b2"][e] if "b2" in w else None)


def statement(x: Tensor, idx: Tensor, prob: Tensor, w: dict[str, Tensor], act: Activation):
    total = torch.zeros_like(x)
    for e in range(len(w["w1"])):
        share = torch.where(idx == e, prob, 0.0).sum(-1, keepdim=True)
        total = total + one_expert(x, w, act, e) * share
    return total


def check(function: Any, exact: Any, leaves: list[Tensor], tolerance: float = 1e-6) -> None:
    """Output and gradients of all leaves, against those of the statement in fp64."""
    ours = [t.detach().requires_grad_() for t in leaves]
    twins = [t.detach().double().requires_grad_() for t in leaves]
    out, want = function(*ours), exact(*twins)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    grads = torch.autograd.grad(out, ours, dout.to(out.dtype))
    expected = torch.autograd.grad(want, twins, dout.double())
    for got, true in zip([out, *grads], [want, *expected], strict=True):
        assert got.shape == true.shape and error(got, true) < tolerance


@pytest.mark.parametrize("backend", ["auto", "reference", "torch"])
@pytest.mark.parametrize("act", [Activation("swiglu"), GPT_OSS, Activation("squared_relu")])
@pytest.mark.parametrize(("top_k", "bias"), [(1, True), (K, True), (K, False)])
def test_is_the_weighted_sum_of_experts(
    act: Activation, backend: str, top_k: int, bias: bool
) -> None:
    w, (x, idx, prob) = weights(act, bias), routed(2, 5, top_k=top_k)
    idx[0, 1, 0], idx[1, 2, 0], idx[1, 3, 0] = -1, E, 1 << 40

    def function(x: Tensor, prob: Tensor, *ws: Tensor) -> Tensor:
        return grouped_experts(x, idx, prob, *ws, activation=act, backend=backend)

    def exact(x: Tensor, prob: Tensor, *ws: Tensor) -> Tensor:
        return statement(x, idx, prob, dict(zip(w, ws, strict=True)), act)

    check(function, exact, [x, prob, *w.values()])


COUNTS = [4, 0, 7, 1, 0, 2]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("backend", ["auto", "reference", "torch"])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("kind", [list, torch.int32, torch.int64])
def test_sorted_rows(backend: str, padding: int, weighted: bool, kind: Any) -> None:
    w, used = weights(GPT_OSS), sum(COUNTS)
    x, prob = torch.randn(used + padding, D), torch.rand(used + padding)
    counts = COUNTS if kind is list else torch.tensor(COUNTS, dtype=kind)

    def function(x: Tensor, prob: Tensor, *ws: Tensor) -> Tensor:
        x = torch.cat((x[:used], torch.full_like(x[used:], float("nan")) + 0 * x[used:]))
        p = prob if weighted else None
        out = grouped_experts_sorted(x, counts, p, *ws, activation=GPT_OSS, backend=backend)
        return out + 0 * prob.sum()

    def exact(x: Tensor, prob: Tensor, *ws: Tensor) -> Tensor:
        named, rows = dict(zip(w, ws, strict=True)), []
        for e, part in enumerate(x[:used].split(COUNTS)):
            rows.append(one_expert(part, named, GPT_OSS, e))
        out = torch.cat(rows) * (prob[:used, None] if weighted else 1.0)
        return F.pad(out, (0, 0, 0, padding)) + 0 * prob.sum() + 0 * x.sum()

    check(function, exact, [x, prob, *w.values()])


def test_nothing_reaches_the_padding_backwards() -> None:
    """Whatever its own gradient is."""
    w, used = weights(GPT_OSS), sum(COUNTS)
    x, prob = torch.randn(used + 3, D, requires_grad=True), torch.rand(used + 3, requires_grad=True)
    for accumulate in (False, True):
        out = grouped_experts_sorted(x, COUNTS, prob, *w.values(), accumulate=accumulate)
        dout = torch.cat((torch.ones(used, D), torch.full((3, D), float("nan"))))
        dx, dprob = torch.autograd.grad(out, [x, prob], dout)
        assert not out[used:].any() and not dx[used:].any() and not dprob[used:].any()
        assert dx.isfinite().all() and dx[:used].any(1).all()


def test_accumulates_into_main_grad() -> None:
    w, (x, idx, prob) = weights(GPT_OSS), routed(9)
    plain = [t.clone().requires_grad_() for t in w.values()]
    grads = torch.autograd.grad(grouped_experts(x, idx, prob, *plain).sum(), plain)
    sums = [t.clone().requires_grad_() for t in w.values()]
    for t in sums:
        t.main_grad, t.grad_added_to_main_grad = torch.ones_like(t), False
    grouped_experts(x, idx, prob, *sums, accumulate=True).sum().backward()
    for t, grad in zip(sums, grads, strict=True):
        torch.testing.assert_close(t.main_grad, grad + 1)
        assert t.grad_added_to_main_grad


@pytest.mark.parametrize("lead", [(0,), (3, 0), (1,)])
def test_few_tokens(lead: tuple[int, ...]) -> None:
    w = {n: t.requires_grad_() for n, t in weights(GPT_OSS).items()}
    x, idx, prob = routed(*lead)
    out = grouped_experts(x, idx, prob, *w.values(), activation=GPT_OSS)
    out.sum().backward()
    assert out.shape == x.shape and all(t.grad is not None for t in w.values())
    rows = grouped_experts_sorted(torch.zeros(0, D), [0] * E, None, *w.values())
    assert rows.shape == (0, D)


def test_the_host_learns_nothing() -> None:
    w = {n: t.requires_grad_() for n, t in weights(GPT_OSS).items()}
    x, idx, prob = routed(9)
    counts = torch.tensor(COUNTS)
    with sync_free():
        grouped_experts(x, idx, prob, *w.values(), backend="torch").sum().backward()
        rows = torch.randn(20, D)
        grouped_experts_sorted(rows, counts, None, *w.values(), backend="torch").sum().backward()


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_follows_autocast(given: torch.dtype) -> None:
    """fp32 rows with bf16 weights, and the other way round."""
    w, (x, idx, prob) = weights(GPT_OSS), routed(9)
    other = torch.bfloat16 if given == torch.float32 else torch.float32
    leaves = [x.to(given).requires_grad_(), *(t.to(other).requires_grad_() for t in w.values())]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_experts(leaves[0], idx, prob, *leaves[1:])
    want = grouped_experts(x.bfloat16(), idx, prob, *(t.bfloat16() for t in w.values()))
    assert out.dtype == torch.bfloat16 and torch.equal(out, want)
    grads = torch.autograd.grad(out.float().sum(), leaves)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    with pytest.raises(ValueError, match="^w1 is (bf16|fp32), x is (fp32|bf16): give them "):
        grouped_experts(leaves[0], idx, prob, *leaves[1:])


def test_checkpointed() -> None:
    w = [t.requires_grad_() for t in weights(GPT_OSS).values()]
    x, idx, prob = routed(9)
    plain = torch.autograd.grad(grouped_experts(x, idx, prob, *w).square().sum(), w)
    out = checkpoint(grouped_experts, x, idx, prob, *w, use_reentrant=False)
    for got, want in zip(torch.autograd.grad(out.square().sum(), w), plain, strict=True):
        assert torch.equal(got, want)


RECIPES = ["fp8_block", Fp8Block(grad_format="e5m2", wgrad="bf16"), "mxfp8", "nvfp4"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: Any) -> None:
    """Quantization changes results, by no more than its formats allow."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(64, 256, generator=g).bfloat16().requires_grad_()
    prob, idx = torch.rand(64, 4, generator=g).topk(2)
    w1 = (torch.randn(4, 256, 256, generator=g) / 16).bfloat16().requires_grad_()
    w2 = (torch.randn(4, 256, 128, generator=g) / 12).bfloat16().requires_grad_()
    leaves = [x, w1, w2]
    counts = torch.tensor([10, 20, 0, 34])

    def results(**options: Any) -> list[Tensor]:
        out = grouped_experts(x, idx, prob, w1, w2, **options)
        rows = grouped_experts_sorted(x, counts, None, w1, w2, **options)
        both = (out.float().square().sum(), rows.float().square().sum())
        return [out, rows, *(t for loss in both for t in torch.autograd.grad(loss, leaves))]

    most = 0.6 if recipe == "nvfp4" else 0.15
    for got, want in zip(results(recipe=recipe), results(), strict=True):
        assert got.dtype == torch.bfloat16 and 1e-3 < error(got, want) < most


def test_modules_have_recipes() -> None:
    m = api.GroupedMLP(4, 128, 128, 2, recipe="fp8_block", dtype=torch.bfloat16)
    x, (prob, idx) = torch.randn(9, 128).bfloat16(), torch.rand(9, 4).topk(2)
    want = grouped_experts(x, idx, prob, m.w1, m.w2, recipe="fp8_block")
    assert torch.equal(m(x, idx, prob), want)
    assert not torch.equal(want, grouped_experts(x, idx, prob, m.w1, m.w2))


@pytest.mark.parametrize(("dynamic", "autocast"), [(False, True), (True, False)])
def test_compiles_as_one_graph(dynamic: bool, autocast: bool) -> None:
    act = Activation("quick_geglu", limit=7.0, offset=1.0)
    w1, w2, b1, _ = (t.requires_grad_() for t in weights(act).values())
    x, idx, prob = routed(9, top_k=2)
    idx[0, 0], idx[1, 1], counts = -1, E, torch.tensor([3, 0, 4, 1, 0, 0])
    leaves = [x.requires_grad_(), prob.requires_grad_(), w1, w2, b1]

    def model(x: Tensor, prob: Tensor) -> Tensor:
        out = grouped_experts(x, idx, prob, w1, w2, b1, activation=act)
        return out + grouped_experts_sorted(x, counts, prob[:, 0], w1, w2, b1, activation=act)

    with compiling(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        whole = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        out = [f(x, prob) for f in (whole, model)]
    got, want = (torch.autograd.grad(o.float().square().sum(), leaves) for o in out)
    for ours, eager in zip(got, want, strict=True):
        torch.testing.assert_close(ours, eager)


def test_examples_run() -> None:
    result = doctest.testmod(experts)
    assert result.attempted == 20 and not result.failed


def test_arguments_are_checked() -> None:
    w, (x, idx, prob) = list(weights(GPT_OSS).values()), routed(9)

    def call(message: str, *given: Any, error: type[Exception] = ValueError, **options: Any):
        with pytest.raises(error, match=message):
            grouped_experts(*given, **options)

    call(r"expected x \[..., D\] and topk_idx, topk_prob", x, idx[:-1], prob, *w)
    call(r"expected x \[..., D\] and topk_idx, topk_prob", x, idx[:, :0], prob[:, :0], *w)
    call(r"expected x \[..., D\] and topk_idx, topk_prob", x[0], idx[0, 0], prob[0, 0], *w)
    call("topk_idx must hold integers", x, prob, prob, *w)
    call("^topk_idx is on meta, the input on cpu: move one", x, idx.to("meta"), prob, *w)
    call("^topk_prob is on meta, the input on cpu", x, idx, prob.to("meta"), *w)
    call("^w2 is on meta, the input on cpu", x, idx, prob, w[0], w[1].to("meta"), *w[2:])
    call(
        "gate and up channels cannot alternate in 47",
        x,
        idx,
        prob,
        w[0][:, 1:],
        *w[1:],
        layout="interleaved",
    )
    call(r"^w1 must be \[E, ., .\], not \[48, 32\]$", x, idx, prob, w[0][0], w[1])
    rows = "^w1 has 47 rows and w2 24 columns of an expert: activation=swiglu needs 2 x as many"
    call(rows, x, idx, prob, w[0][:, :-1], *w[1:])
    call("^w2 has 5 experts, w1 has 6$", x, idx, prob, w[0], w[1][1:], *w[2:])
    silu = "^activation must be an Activation or one of swiglu, .*, not silu; silu with a gate is s"
    call(silu, x, idx, prob, *w, activation=F.silu)
    call("unknown activation 'gelu'", x, idx, prob, *w, activation="gelu")
    call("backend=te is unknown", x, idx, prob, *w, backend="te")
    call("recipe='int8' is unknown: use one of fp8_block", x, idx, prob, *w, recipe="int8")
    call("layout='rows' is unknown: use one of halves", x, idx, prob, *w, layout="rows")
    for recipe, values in ((Fp8Block, dict(hidden="int8")), (Microscaling, dict(format="mx"))):
        with pytest.raises(ValueError, match="^(hidden|format)='(int8|mx)' is unknown: use"):
            recipe(**values)
    call("hidden=fp8 is for", x, idx, prob, *w, recipe=Fp8Block(hidden="fp8"))
    call("limit is no option", x, idx, prob, *w, limit=7.0, error=TypeError)
    refused = "^backend=fused cannot run here: needs CUDA; use backend=reference or backend=auto$"
    call(refused, x, idx, prob, *w, backend="fused", error=KernelUnavailable)
    with pytest.raises(ValueError, match=r"counts must be \[6\], the rows"):
        grouped_experts_sorted(x, [1, 2], None, *w)
    with pytest.raises(ValueError, match="counts must hold integers, the rows of each"):
        grouped_experts_sorted(x, [1.5] * E, None, *w)
    with pytest.raises(ValueError, match="counts must not be negative, as -4 is"):
        grouped_experts_sorted(x, [9, -4, 4, 0, 0, 0], None, *w)
    with pytest.raises(ValueError, match="row_prob is on meta, the input on cpu"):
        grouped_experts_sorted(x, [1] * E, torch.ones(9, device="meta"), *w)
    with pytest.raises(ValueError, match="counts sum to 60, more than the 9 rows"):
        grouped_experts_sorted(x, [10] * E, None, *w)
    with pytest.raises(ValueError, match=r"expected rows \[S, D\] and row_prob \[S\]"):
        grouped_experts_sorted(x, COUNTS, prob, *w)
