"""The torch backend on an NVIDIA GPU: accuracy, determinism, no synchronisation, capture."""

from dataclasses import fields, replace

import pytest
import torch

from kernels.activation import Activation
from kernels.grouped_mlp import combine
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
    random_choice,
    run,
)

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CLAMPED = Activation("quick_geglu", alpha=1.702, limit=0.7, offset=1.0)
SIZES = dict(L=6, D=256, width=192)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()  # each activation is a variant, and torch stops compiling after eight


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


def _problem(seed: int = 0) -> Problem:
    choice = random_choice(300, 3, [0, 1, 2, 4, 5], seed)  # expert 3 has no rows
    return make(CLAMPED, BF16, choice=choice, rows=1024, **SIZES).to("cuda")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_error_is_that_of_plain_torch(act, bias):
    p = make(act, BF16, bias=bias, rows=128)
    exact, plain, ours = dense(p), composition(p), run(p.to("cuda"), "torch")
    for name in exact:
        assert error(ours[name].cpu(), exact[name]) <= 2 * error(plain[name], exact[name]), name


def test_close_to_reference():
    p = replace(_problem(), act=Activation("swiglu"))  # no clamp, hence no corner to round across
    ours, reference = run(p, "torch"), run(p, "reference")
    for name in reference:
        assert error(ours[name], reference[name]) < 1e-2, name


def test_integers_are_equal():
    p = make(Activation("squared_relu", limit=3.0), BF16, integers=True, rows=128).to("cuda")
    _same(run(p, "torch"), run(p, "reference"))


@pytest.mark.parametrize(
    "choice",
    [[[-1, 2]] * 30, [[-1, 1]], [[-1, -1]] * 5, random_choice(30, 3, [1, 2])],
    ids=["one expert has all", "one row", "nothing here", "idle experts at both ends"],
)
def test_uneven_routing(choice):
    p = make(CLAMPED, BF16, choice=choice, rows=96)
    exact, plain, ours = dense(p), composition(p), run(p.to("cuda"), "torch")
    for name in exact:
        bound = 2 * error(plain[name], exact[name]) + 1e-3
        assert error(ours[name].cpu(), exact[name]) <= bound, name
    idle = p.offsets.diff() == 0
    for name in ("dw1", "dw2", "db1", "db2"):
        assert not ours[name].cpu()[idle].any(), name


def test_padding_has_no_influence():
    clean, used = _problem(), int(_problem().offsets[-1])
    prob, index, x = clean.prob.clone(), clean.index.clone(), clean.x.clone()
    prob[used:], index[used:] = float("nan"), 2**30
    unread = (clean.inverse < 0).all(1)
    x[unread] = float("nan")
    expected = run(clean, "torch")
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        ours = run(replace(clean, prob=prob, index=index, x=x), "torch", poison=True)
    finally:
        torch.use_deterministic_algorithms(False)
    assert unread.any()
    _same(ours, expected)


def test_runs_repeat_bit_for_bit():
    p = _problem()
    first = run(p, "torch")
    for _ in range(5):
        _same(run(p, "torch"), first)


def test_combine_has_the_bits_of_the_cpu():
    y = torch.randn(900, 256, generator=torch.Generator().manual_seed(0)).to(BF16)
    inverse = torch.randperm(1200, generator=torch.Generator().manual_seed(1)).int().view(150, 8)
    inverse = inverse.masked_fill(inverse >= 900, -1)
    index, offsets = torch.zeros(900).int(), torch.tensor([0, 900]).int()

    def on(device: str) -> torch.Tensor:
        plan = dict(row_index_S=index, offsets=offsets, inverse_NK=inverse)
        return combine(y.to(device), **{k: v.to(device) for k, v in plan.items()}).cpu()

    assert torch.equal(on("cuda"), on("cpu"))


def test_host_never_waits():
    p = _problem()
    expected = run(p, "torch")  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = run(p, "torch")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    _same(ours, expected)


def test_graph_replays_other_routings():
    """One capture of forward and backward serves every routing that fits its buffers."""
    problems = [_problem(seed) for seed in range(3)]
    names = [
        f.name for f in fields(Problem) if isinstance(getattr(problems[0], f.name), torch.Tensor)
    ]
    static = replace(problems[0], **{n: getattr(problems[0], n).clone() for n in names})
    leaves = leaves_of(static)

    def step() -> dict[str, torch.Tensor]:
        return gradients(forward(static, leaves, "torch"), static.dout, leaves)

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
        _same(result, run(p, "torch"))


def test_fp32_is_refused():
    p = make(CLAMPED, torch.float32).to("cuda")
    with pytest.raises(ValueError, match="kernels=torch takes bf16 on CUDA"):
        run(p, "torch")
