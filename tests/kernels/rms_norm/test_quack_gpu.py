"""RMSNorm by QuACK's kernels on a Hopper GPU: errors beside others', bits, layouts, graphs.

With `-s` the tests print errors and times.
"""

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)
pytest.importorskip("quack")

from phalanx.kernels.rms_norm.rms_norm import fork, rms_norm
from tests.kernels.capture import check_replay
from tests.kernels.rms_norm.problems import Problem, error, plain
from tests.kernels.sm90.timing import microseconds

pytestmark = pytest.mark.gpu

WIDTHS = (8, 64, 128, 200, 512, 1024, 1536, 2048, 2880, 4096, 5120, 7168, 8192)
BOTH = ((True, True), (True, False), (False, True))
FLOOR = 1e-6
"""Tolerance of an error that both have; the others are multiples of 2^-9."""


def gpu(*shape: int, **given) -> Problem:
    return Problem(shape, device="cuda", **given)


def compare(problem: Problem) -> None:
    exact, torchs, got = problem.exact(), problem.run("torch"), problem.run("quack")
    for name, value in exact.items():
        assert got[name].dtype == torch.bfloat16 and got[name].shape == value.shape
        ours, others = error(got[name], value), error(torchs[name], value)
        print(f"{problem.shape} {name}: {ours:.2e}, torch {others:.2e}")
        assert ours <= 1.1 * others + FLOOR, name


@pytest.mark.parametrize("N", WIDTHS)
@pytest.mark.parametrize("residual", [False, True])
def test_every_width_is_as_exact_as_torch(N, residual):
    for rows in (1, 3, 130, 4099):
        compare(gpu(rows, N, residual=residual, seed=rows))


@pytest.mark.parametrize("N", [256, 2048])
@pytest.mark.parametrize("residual", [False, True])
def test_weights_stored_less_1(N, residual):
    for rows in (1, 130, 4099):
        compare(gpu(rows, N, residual=residual, centered=True))


@pytest.mark.parametrize("upstream", BOTH)
@pytest.mark.parametrize("residual", [False, True])
def test_either_gradient_or_both(upstream, residual):
    for N in (128, 2048, 2880):
        compare(gpu(5, 77, N, residual=residual, upstream=upstream))


def test_no_rows():
    for residual in (False, True):
        got = gpu(0, 2048, residual=residual).run("quack")
        assert got["normed"].shape == got["dx"].shape == (0, 2048)
        assert not got["dweight"].any()


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1e4, 1e12])
def test_small_and_large_values(scale):
    """Small ones feel epsilon; squares of large ones are far beyond bf16's three digits."""
    compare(gpu(300, 2880, scale=scale))


@pytest.mark.parametrize("layout", ["heads", "latents", "misaligned", "odd stride", "one row"])
def test_rows_of_any_layout(layout):
    whole = torch.randn(64, 2, 6, 3 * 128, device="cuda").bfloat16()
    flat = whole.flatten()
    x = {
        "heads": whole[..., 128:256],  # keys of a mixed projection, read where they are
        "latents": flat[: 500 * 576].view(500, 576)[:, :512],
        "misaligned": flat[: 300 * 264].view(300, 264)[:, 4:260],
        "odd stride": flat[: 300 * 257].view(300, 257)[:, :256],
        "one row": flat[:257].view(1, 257)[:, :256],
    }[layout]
    weight = torch.rand(x.shape[-1], device="cuda").bfloat16().requires_grad_()
    d = torch.randn(x.shape, device="cuda").bfloat16()
    results = []
    for given in (x, x.clone(memory_format=torch.contiguous_format)):
        leaf = given.detach().requires_grad_()
        out = rms_norm(leaf, weight, 1e-5, backend="quack")
        results.append([out.detach(), *torch.autograd.grad(out, (leaf, weight), d)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_the_norm_alone_has_the_bits_of_the_pair():
    problem = gpu(1000, 2048, residual=False, upstream=(True, False))
    got = problem.run("quack")
    for a, name in zip(plain(problem, "quack"), ("normed", "dx", "dweight"), strict=True):
        assert torch.equal(a, got[name])


@pytest.mark.parametrize("N", [128, 2048, 2880, 7168])
def test_repeats_are_equal_and_the_host_never_waits(N):
    problem = gpu(8192 if N < 4096 else 4096, N)
    problem.run("quack")  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        first, *others = [problem.run("quack") for _ in range(5)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for other in others:
        for name, value in first.items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("residual", [False, True])
def test_a_graph_replays_the_eager_bits(residual):
    problem = gpu(515, 2880, residual=residual)
    leaf = problem.given["x"]
    new = gpu(515, 2880, seed=1).given["x"]
    check_replay(lambda: list(problem.run("quack").values()), leaf, new)


def test_weights_accumulate_in_fp32():
    problem = gpu(4096, 2048)
    weight = torch.nn.Parameter(problem.given["weight"].clone())
    weight.main_grad = torch.zeros(2048, device="cuda")
    weight.grad_added_to_main_grad = False
    x = problem.given["x"].requires_grad_()
    for _ in range(2):
        out = rms_norm(x, weight, 1e-5, backend="quack", accumulate=True)
        out.backward(problem.given["dnormed"])
    assert weight.grad_added_to_main_grad
    alone = replace(problem, residual=False, upstream=(True, False))
    alone.given["x"] = alone.given["x"].detach()
    exact = 2 * alone.exact()["dweight"]
    assert error(weight.main_grad, exact) <= 1e-5


def test_beside_transformer_engine():
    te = pytest.importorskip("transformer_engine.pytorch")
    problem = gpu(4096, 2880, residual=False, upstream=(True, False))
    norm = te.RMSNorm(2880, eps=problem.eps, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        norm.weight.copy_(problem.given["weight"])
    x = problem.given["x"].clone().requires_grad_()
    out = norm(x)
    grads = torch.autograd.grad(out, (x, norm.weight), problem.given["dnormed"])
    exact = problem.exact()
    theirs = dict(zip(("normed", "dx", "dweight"), (out.detach(), *grads), strict=True))
    got = problem.run("quack")
    for name, value in theirs.items():
        ours, others = error(got[name], exact[name]), error(value, exact[name])
        print(f"{name}: {ours:.2e}, te {others:.2e}")
        assert ours <= 1.1 * others + FLOOR, name


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "N"), [(8192, 2048), (8192, 2880), (4096, 7168), (262144, 128)])
def test_speed(rows, N):
    problem = gpu(rows, N)
    x, residual, weight = problem.leaves(torch.bfloat16)
    passes = dict(forward=4, backward=4)
    upstream = [problem.given["dnormed"], problem.given["dtotal"]]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # a capture cannot wait for the default one
        normed, total = fork(x, residual, weight, 1e-5, backend="quack")

    def forward():
        with torch.no_grad():
            fork(x, residual, weight, 1e-5, backend="quack")

    def backward():
        torch.autograd.grad((normed, total), (x, weight), upstream, retain_graph=True)

    for name, call in (("forward", forward), ("backward", backward)):
        time = microseconds(call, calls=5)
        rate = 2e-6 * passes[name] * rows * N / time
        print(f"{name} of {rows} x {N}: {time:.1f} us, {rate:.2f} TB/s")
        assert rate >= (2.5 if N > 1024 else 1.5)
