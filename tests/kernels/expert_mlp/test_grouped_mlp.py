"""The expert MLP of every backend against its dense statement, and what the layer relies on."""

from dataclasses import replace

import pytest
import torch

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec, MLPWeights
from phalanx.kernels.expert_mlp.torch_grouped import Grouped
from tests.kernels.problems import (
    ACTIVATIONS,
    composition,
    dense,
    error,
    forward,
    gradients,
    leaves_of,
    make,
    random_choice,
    run,
)
from tests.support.sync_free import HostSync, sync_free

BACKENDS = ["reference", "torch"]
CLAMPED = Activation("quick_geglu", alpha=1.702, limit=0.7, offset=1.0)
NAN = float("nan")
ROUTINGS = {
    "an expert without rows": random_choice(30, 3, [0, 2, 3]),
    "first and last expert without rows": random_choice(30, 3, [1, 2]),
    "one expert has all": [[-1, 2]] * 30,
    "one row": [[-1, 1]],
    "nothing here": [[-1, -1]] * 5,
}


def _id(value: object) -> str | None:
    if isinstance(value, Activation):
        return f"{value.kind}{'-clamped' if value.limit else ''}"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=_id)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=_id)
def test_error_is_that_of_plain_torch(act, bias, dtype, backend):
    p = make(act, dtype, bias=bias, rows=128)
    exact, plain, ours = dense(p), composition(p), run(p, backend)
    assert ours.keys() == exact.keys()
    for name in exact:
        assert ours[name].dtype == (torch.float32 if name == "dprob" else dtype)
        assert error(ours[name], exact[name]) <= 2 * error(plain[name], exact[name]), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", [0.0, 3.0])
def test_integers_are_exact_in_fp32(backend, limit):
    p = make(Activation("squared_relu", limit=limit), torch.float32, integers=True, rows=128)
    exact = dense(p)
    _same({k: v.double() for k, v in run(p, backend).items()}, exact)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("act", [CLAMPED, Activation("squared_relu")], ids=_id)
def test_halves_make_the_whole(act, backend):
    p = make(act, torch.bfloat16, rows=256)
    _same(run(p, backend), run(p, backend, split=True))


def test_integers_are_equal_in_bf16():
    p = make(Activation("squared_relu", limit=3.0), torch.bfloat16, integers=True, rows=128)
    _same(run(p, "torch"), run(p, "reference"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_uneven_routing(backend, routing):
    p = make(CLAMPED, torch.float32, choice=ROUTINGS[routing], rows=96)
    exact, ours = dense(p), run(p, backend)
    for name in exact:
        assert error(ours[name], exact[name]) < 1e-6, name
    idle = p.offsets.diff() == 0
    for name in ("dw1", "dw2", "db1", "db2"):
        assert not ours[name][idle].any(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=_id)
@pytest.mark.parametrize("routing", ["some rows unread", "nothing here"])
def test_padding_has_no_influence(routing, dtype, backend):
    choice = random_choice(40, 3, [0, 1, 2, 3])
    choice[7] = choice[20] = [-1, -1, -1]
    choice = ROUTINGS.get(routing, choice)
    used = sum(e >= 0 for slots in choice for e in slots)
    clean = make(CLAMPED, dtype, choice=choice, rows=used + 33)
    dirty = make(CLAMPED, dtype, choice=choice, rows=used + 33)
    unread = (dirty.inverse < 0).all(1)
    dirty.x[unread] = NAN
    dirty.prob[used:] = NAN
    dirty.index[used:], dirty.index[-1] = 2**30, -5
    expected = run(clean, backend)
    assert all(v.isfinite().all() for v in expected.values())
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        results = [run(dirty, backend), run(dirty, backend, poison=True)]
    finally:
        torch.use_deterministic_algorithms(False)
    for ours in results:
        _same(ours, expected)
        assert not ours["dprob"][used:].any()
        assert not ours["out"][unread].any() and not ours["dx"][unread].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_budget_does_not_matter(backend):
    tight = make(CLAMPED, torch.float32)
    used = len(tight.index)
    roomy = make(CLAMPED, torch.float32, rows=3 * used)
    roomy.prob[:used] = tight.prob
    expected, ours = run(tight, backend), run(roomy, backend)
    ours["dprob"] = ours["dprob"][:used]
    for name in expected:
        assert error(ours[name], expected[name]) < 1e-6, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_combine_adds_slots_in_order(backend):
    y = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    inverse = torch.randperm(64, generator=torch.Generator().manual_seed(1)).view(8, 8).int()
    inverse[3] = -1
    inverse[5, ::2] = -1
    y[inverse[0, 0]], y[inverse[0, 1]] = 2.0**24, -(2.0**24)  # in another order, small terms drown
    expected = torch.zeros(8, 16)
    for n in range(8):
        for s in inverse[n].tolist():
            expected[n] += y[s].float() if s >= 0 else 0.0
    assert torch.equal(provider(backend).combine(y, inverse), expected.bfloat16())


def test_runs_repeat_bit_for_bit():
    p = make(CLAMPED, torch.bfloat16, rows=128)
    _same(run(p, "torch"), run(p, "torch"))


@pytest.mark.parametrize("act", [CLAMPED, Activation("squared_relu")], ids=_id)
@pytest.mark.parametrize("backend", BACKENDS)
def test_only_x_and_h_are_saved(backend, act):
    p = make(act, torch.bfloat16, rows=256)
    leaves, saved = leaves_of(p), {}
    parameters = {leaves[name].data_ptr() for name in ("w1", "w2", "b1", "b2")}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in parameters:
            saved[t.data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = forward(p, leaves, backend)
    assert out.grad_fn is not None
    h = 256 * p.w1.shape[1] * 2
    indices = sum(t.nbytes for t in (p.prob, p.index, p.offsets, p.inverse))
    assert sum(saved.values()) == p.x.nbytes + h + indices


def test_without_gradients_h_is_not_kept(monkeypatch):
    p, kept = make(CLAMPED, torch.float32), []
    fc1_act = Grouped.fc1_act

    def spy(self, call):
        kept.append(call.keep_h)
        return fc1_act(self, call)

    monkeypatch.setattr(Grouped, "fc1_act", spy)
    out = forward(p, leaves_of(p), "torch")
    with torch.no_grad():
        assert torch.equal(forward(p, leaves_of(p), "torch"), out)
    assert kept == [True, False]


def test_margins_change_nothing():
    p = make(CLAMPED, torch.bfloat16, rows=128)
    leaves = leaves_of(p)
    out = forward(p, leaves, "torch", margins=Margins(8, 16, 24))
    _same(gradients(out, p.dout, leaves), run(p, "torch"))
    with pytest.raises(ValueError, match="kernels.sm_margin.wgrad to 0 or more"):
        Margins(wgrad=-8)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=_id)
@pytest.mark.parametrize("act", ACTIVATIONS, ids=_id)
def test_torch_backend_never_asks_the_device(act, dtype, bias):
    p = make(act, dtype, bias=bias, rows=128)
    with sync_free():
        run(p, "torch")


def test_reference_backend_does_ask():
    with pytest.raises(HostSync), sync_free():
        run(make(CLAMPED, torch.float32), "reference")


def test_frozen_weights_and_expanded_gradient():
    """Only x wants a gradient, and `sum` hands down one number seen through strides of 0."""
    p = make(CLAMPED, torch.float32)
    p = replace(p, dout=torch.ones_like(p.x))
    x = p.x.clone().requires_grad_()
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)
    y = grouped_mlp(x, MLPWeights(p.w1, p.w2, p.b1, p.b2), plan, MLPSpec(p.act, "torch"))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, run(p, "torch")["dx"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, w1=p.w1[:, :-1]), r"w1 must be torch.float32 \[4, 48, 32\]"),
        (lambda p: replace(p, w2=p.w2.double()), "w2 must be torch.float32"),
        (lambda p: replace(p, b1=p.b1[:, 1:]), "b1 must be"),
        (lambda p: replace(p, prob=p.prob.bfloat16()), "row_prob must be torch.float32"),
        (lambda p: replace(p, offsets=p.offsets.long()), r"offsets must be torch.int32 \[5\]"),
        (lambda p: replace(p, inverse=p.inverse[1:]), "inverse must be"),
        (lambda p: replace(p, x=p.x[0]), r"expected x \[N, D\]"),
    ],
)
def test_shapes_and_dtypes_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        run(change(make(CLAMPED, torch.float32)), "torch")


def test_unknown_backend():
    p = make(CLAMPED, torch.float32)
    for split in (False, True):
        with pytest.raises(ValueError, match="kernels.backend=te .* kernels=torch"):
            run(p, "te", split=split)


def test_gradients_of_gradients_are_refused():
    p = make(CLAMPED, torch.float32)
    leaves = leaves_of(p)
    out = forward(p, leaves, "torch")
    with pytest.raises(RuntimeError, match="first gradients only"):
        torch.autograd.grad(out.sum(), leaves["x"], create_graph=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=_id)
@pytest.mark.parametrize("count", [1, 2])
def test_addends_follow_the_sum_and_have_its_gradient(count, dtype, backend):
    p = make(ACTIVATIONS[0], dtype)
    g = torch.Generator().manual_seed(3)
    addends = [torch.randn(p.x.shape, generator=g).to(dtype).requires_grad_() for _ in range(count)]
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)
    results = []
    for more in ((), addends):
        x = p.x.clone().requires_grad_()
        w = MLPWeights(p.w1.clone().requires_grad_(), p.w2, p.b1, p.b2)
        out = grouped_mlp(x, w, plan, MLPSpec(p.act, backend), addends=more)
        results.append((out, torch.autograd.grad(out, (x, w.w1, *more), p.dout)))
    (alone, before), (out, after) = results
    for addend in addends:
        alone = alone + addend
    assert torch.equal(out, alone)
    assert all(torch.equal(a, b) for a, b in zip(before, after[:2], strict=True))
    assert all(torch.equal(a, p.dout) for a in after[2:])


def test_addends_alone_may_have_a_gradient():
    p = make(ACTIVATIONS[0], torch.float32)
    addend = torch.zeros_like(p.x).requires_grad_()
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)
    weights = MLPWeights(p.w1, p.w2, p.b1, p.b2)
    out = grouped_mlp(p.x, weights, plan, MLPSpec(p.act, "torch"), addends=[addend])
    out.backward(p.dout)
    assert torch.equal(addend.grad, p.dout)


def test_addends_that_cannot_be_added_are_refused():
    p = make(ACTIVATIONS[0], torch.float32)
    weights, spec = MLPWeights(p.w1, p.w2, p.b1, p.b2), MLPSpec(p.act, "torch")
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)
    with pytest.raises(ValueError, match="at most 2, not 3"):
        grouped_mlp(p.x, weights, plan, spec, addends=[p.x] * 3)
    rows = ExpertPlan(None, p.prob[: len(p.x)], p.offsets.clamp(max=len(p.x)), None)
    with pytest.raises(ValueError, match="only for sums over experts"):
        grouped_mlp(p.x, weights, rows, spec, addends=[p.x])
