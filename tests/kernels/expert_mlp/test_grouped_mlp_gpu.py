"""Backends on an NVIDIA GPU: accuracy, determinism, no synchronisation, capture, memory."""

from dataclasses import fields, replace

import pytest
import torch

from phalanx.kernels.expert_mlp.activation import Activation
from phalanx.kernels.expert_mlp.backend import provider
from phalanx.kernels.expert_mlp.expert_plan import ExpertPlan
from phalanx.kernels.expert_mlp.grouped_mlp import grouped_mlp
from phalanx.kernels.expert_mlp.mlp_spec import Margins, MLPSpec, MLPWeights
from phalanx.kernels.functional.module import GroupedMLP
from phalanx.kernels.registry import Facts, KernelUnavailable, resolve
from tests.kernels.problems import (
    ACTIVATIONS,
    Problem,
    composition,
    dense,
    error,
    forward,
    gradients,
    leaves_of,
    make,
    one_expert,
    random_choice,
    run,
)

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CLAMPED = Activation("quick_geglu", alpha=1.702, limit=0.7, offset=1.0)
SIZES = dict(L=6, D=256, width=192)
SMALL = dict(D=128, width=64)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()  # each activation is a variant, and torch stops compiling after eight


@pytest.fixture(params=["torch", "fused"])
def backend(request):
    facts = Facts("cuda", torch.cuda.get_device_capability(), BF16, hidden=256, ffn=192)
    try:
        return resolve("grouped_mlp", request.param, facts).backend
    except KernelUnavailable as reason:
        pytest.skip(str(reason))


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


def _problem(seed: int = 0) -> Problem:
    choice = random_choice(300, 3, [0, 1, 2, 4, 5], seed)  # expert 3 has no rows
    return make(CLAMPED, BF16, choice=choice, rows=1024, **SIZES).to("cuda")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_error_is_that_of_plain_torch(act, bias, backend):
    p = make(act, BF16, bias=bias, rows=128, **SMALL)
    exact, plain, ours = dense(p), composition(p), run(p.to("cuda"), backend)
    for name in exact:
        assert error(ours[name].cpu(), exact[name]) <= 2 * error(plain[name], exact[name]), name


@pytest.mark.parametrize("split", [False, True])
def test_close_to_reference(split, backend):
    p = replace(_problem(), act=Activation("swiglu"))  # no clamp, hence no corner to round across
    ours, reference = run(p, backend, split=split), run(p, "reference")
    for name in reference:
        assert error(ours[name], reference[name]) < 1e-2, name


def test_integers_are_equal(backend):
    act = Activation("squared_relu", limit=3.0)
    p = make(act, BF16, integers=True, rows=128, **SMALL).to("cuda")
    _same(run(p, backend), run(p, "reference"))


@pytest.mark.parametrize(
    "choice",
    [[[-1, 2]] * 30, [[-1, 1]], [[-1, -1]] * 5, random_choice(30, 3, [1, 2])],
    ids=["one expert has all", "one row", "nothing here", "idle experts at both ends"],
)
def test_uneven_routing(choice, backend):
    p = make(CLAMPED, BF16, choice=choice, rows=96, **SMALL)
    exact, plain, ours = dense(p), composition(p), run(p.to("cuda"), backend)
    for name in exact:
        bound = 2 * error(plain[name], exact[name]) + 1e-3
        assert error(ours[name].cpu(), exact[name]) <= bound, name
    idle = p.offsets.diff() == 0
    for name in ("dw1", "dw2", "db1", "db2"):
        assert not ours[name].cpu()[idle].any(), name


def test_padding_has_no_influence(backend):
    clean, used = _problem(), int(_problem().offsets[-1])
    prob, index, x = clean.prob.clone(), clean.index.clone(), clean.x.clone()
    prob[used:], index[used:] = float("nan"), 2**30
    unread = (clean.inverse < 0).all(1)
    x[unread] = float("nan")
    expected = run(clean, backend), run(clean, backend, split=True)
    dirty = replace(clean, prob=prob, index=index, x=x)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        ours = run(dirty, backend), run(dirty, backend, poison=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert unread.any()
    for got, want in zip(ours, expected, strict=True):
        _same(got, want)


def test_runs_repeat_bit_for_bit(backend):
    p = _problem()
    first = run(p, backend)
    for margin in (0, 8, 32):
        leaves = leaves_of(p)
        out = forward(p, leaves, backend, margins=Margins(margin, margin, margin))
        _same(gradients(out, p.dout, leaves), first)


def test_combine_has_the_bits_of_the_cpu(backend):
    y = torch.randn(900, 256, generator=torch.Generator().manual_seed(0)).to(BF16)
    inverse = torch.randperm(1200, generator=torch.Generator().manual_seed(1)).int().view(150, 8)
    inverse = inverse.masked_fill(inverse >= 900, -1)

    def on(device: str) -> torch.Tensor:
        name = "torch" if device == "cpu" else backend
        return provider(name).combine(y.to(device), inverse.to(device)).cpu()

    assert torch.equal(on("cuda"), on("cpu"))


def test_host_never_waits(backend):
    p = _problem()
    expected = run(p, backend)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = run(p, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    _same(ours, expected)


def test_graph_replays_other_routings(backend):
    """One capture of forward and backward serves every routing that fits its buffers."""
    problems = [_problem(seed) for seed in range(3)]
    names = [
        f.name for f in fields(Problem) if isinstance(getattr(problems[0], f.name), torch.Tensor)
    ]
    static = replace(problems[0], **{n: getattr(problems[0], n).clone() for n in names})
    leaves = leaves_of(static)

    def step() -> dict[str, torch.Tensor]:
        return gradients(forward(static, leaves, backend), static.dout, leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    for p in problems[::-1]:
        for n in names:
            getattr(static, n).copy_(getattr(p, n))
        graph.replay()
        _same(result, run(p, backend))


def test_buffers_add_up_in_fp32(backend):
    p = _problem()
    leaves, expected = leaves_of(p), run(p, backend)
    names = ("w1", "w2", "b1", "b2")
    for name in names:
        leaves[name].main_grad = torch.zeros(leaves[name].shape, device="cuda")
    for _ in range(2):
        forward(p, leaves, backend, accumulate=True).backward(p.dout)
    for name in names:
        assert error(leaves[name].main_grad, 2 * expected[f"d{name}"].float()) < 2**-8, name
    first = {name: leaves[name].main_grad.clone() for name in names}
    for name in names:
        leaves[name].main_grad.zero_()
    for _ in range(2):
        forward(p, leaves, backend, accumulate=True).backward(p.dout)
    for name in names:
        assert torch.equal(leaves[name].main_grad, first[name]), name


def test_dense_layers_are_one_group(backend):
    g = torch.Generator("cuda").manual_seed(0)
    shapes = {"x": (300, 256), "w1": (384, 256), "w2": (256, 192), "b1": (384,), "b2": (256,)}
    given = {
        k: torch.randn(s, generator=g, device="cuda").mul(0.1 if k[0] == "w" else 1).to(BF16)
        for k, s in shapes.items()
    }
    results = []
    for name in ("reference", backend):
        leaves = {k: v.clone().requires_grad_() for k, v in given.items()}
        weights = MLPWeights(*(leaves[k] for k in ("w1", "w2", "b1", "b2")))
        out = one_expert(leaves["x"], weights, MLPSpec(Activation("swiglu"), name))
        results.append([out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))])
    for theirs, ours in zip(*results, strict=True):
        assert error(ours, theirs) < 1e-2


def test_between_the_passes_live_x_h_and_indices(backend):
    """In the allocator's bytes: 2 * T * D that were there before, 4 * rows * F, and the plan."""
    T, K, L, D, F = 512, 4, 8, 256, 192
    m = GroupedMLP(L, D, F, K, backend=backend, device="cuda", dtype=BF16)
    x = torch.randn(T, D, device="cuda", dtype=BF16, requires_grad=True)
    prob, idx = torch.rand(T, L, device="cuda").topk(K)
    idx, prob = idx.int(), prob.requires_grad_()
    for _ in range(2):  # compiles, and makes what stays: claim counters, gradients
        m(x, idx, prob).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = m(x, idx, prob)
    kept = torch.cuda.memory_allocated() - before
    tensors = [out.nbytes, 4 * T * K * F, 4 * T * K, 4 * T * K, 4 * T * K, 4 * (L + 1), 4 * L]
    assert kept <= sum(-(-n // 512) * 512 for n in tensors)
    assert kept >= out.nbytes + 4 * T * K * F


def test_auto_takes_the_fused_kernels():
    facts = Facts("cuda", torch.cuda.get_device_capability(), BF16, hidden=256, ffn=192)
    if facts.capability[0] != 9 or "nvidia_cutlass_dsl" not in facts.packages:
        pytest.skip("needs a Hopper GPU and the compiler")
    assert resolve("grouped_mlp", "auto", facts).backend == "fused"


def test_fp32_is_refused():
    p = make(CLAMPED, torch.float32).to("cuda")
    with pytest.raises(ValueError, match="kernels=torch takes bf16 on CUDA"):
        run(p, "torch")


@pytest.mark.parametrize("count", [1, 2])
def test_addends_are_added_and_have_the_gradient(count, backend):
    """Fused: rounded once with the sum, so never further from fp64 than an addition after it."""
    p = _problem()
    addends = [
        torch.randn(p.x.shape, device="cuda").to(BF16).requires_grad_() for _ in range(count)
    ]
    plan = ExpertPlan(p.index, p.prob, p.offsets, p.inverse)
    spec, weights = MLPSpec(p.act, backend), MLPWeights(p.w1, p.w2, p.b1, p.b2)
    wide = MLPWeights(*(w if w is None else w.double() for w in weights))
    exact = grouped_mlp(p.x.double(), wide, plan, MLPSpec(p.act, "reference"))
    alone = grouped_mlp(p.x, weights, plan, spec)
    for addend in addends:
        exact, alone = exact + addend.detach().double(), alone + addend.detach()
    out = grouped_mlp(p.x, weights, plan, spec, addends=addends)
    assert error(out.detach(), exact) <= 1.01 * error(alone, exact)
    for d in torch.autograd.grad(out, addends, p.dout):
        assert torch.equal(d, p.dout)
