"""RMSNorm with and without a residual against fp64, and the compiled kernels, without a GPU."""

from pathlib import Path

import pytest
import torch

from phalanx.kernels.cache import Cache
from phalanx.kernels.limits import unsupported_width
from phalanx.kernels.rms_norm.rms_norm import fork, rms_norm
from tests.kernels.interpreter import interpret
from tests.kernels.rms_norm.problems import Problem, error, plain

ULP = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("upstream", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 24), (1, 8), (0, 16)])
def test_torch_is_the_definition(dtype, residual, upstream, centered, shape):
    problem = Problem(shape, residual, upstream, dtype=dtype, centered=centered)
    exact, got = problem.exact(), problem.run("torch")
    assert exact.keys() == got.keys()
    for name, value in exact.items():
        assert got[name].dtype == dtype and got[name].shape == value.shape
        assert error(got[name], value) <= ULP[dtype], name


def test_the_sum_is_what_pytorch_makes_of_both_and_its_norm_that_of_the_rounded_sum():
    problem = Problem((7, 40))
    x, residual, weight = (problem.given[n] for n in ("x", "residual", "weight"))
    normed, total = fork(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))
    assert fork(x, None, weight, 1e-5)[1] is x
    assert torch.equal(plain(problem, "torch")[0], rms_norm(x, weight, 1e-5))


def test_a_weight_stored_less_1_is_added_to_1_in_fp32():
    """1 + 2^-9 is no number of bf16: rounded to one it is 1."""
    x = torch.linspace(0.5, 3, 512)[None].bfloat16()
    weight = torch.full((512,), 2.0**-9).bfloat16()
    wide = x.double() / x.double().square().mean().sqrt() * (1 + 2.0**-9)
    assert torch.equal(rms_norm(x, weight, 0.0, centered=True), wide.bfloat16())
    assert not torch.equal(rms_norm(x, 1 + weight, 0.0), wide.bfloat16())


def test_what_cannot_run_is_refused():
    x, weight = torch.zeros(2, 16), torch.ones(16)
    with pytest.raises(ValueError, match="unknown norm backend 'apex'"):
        rms_norm(x, weight, 1e-5, backend="apex")
    with pytest.raises(ValueError, match="unknown norm backend 'te'"):
        fork(x, None, weight, 1e-5, backend="te")
    pytest.importorskip("quack")
    with pytest.raises(ValueError, match="kernels.norm=quack needs bf16, but x is torch.float32"):
        rms_norm(x, weight, 1e-5, backend="quack")
    with pytest.raises(ValueError, match="kernels.norm=quack needs CUDA capability 9.0"):
        rms_norm(x.bfloat16(), weight.bfloat16(), 1e-5, backend="quack")


@pytest.mark.parametrize(
    ("channels", "words"),
    [
        (8, None),
        (2880, None),
        (8192, None),
        (0, "8 to 8192 channels, in multiples of 8, not 0"),
        (100, "not 100"),
        (8200, "not 8200"),
    ],
)
def test_widths(channels, words):
    why = unsupported_width(channels)
    assert why is None if words is None else words in why


def test_kernels_are_compiled_for_hopper_without_a_gpu_and_once(tmp_path: Path):
    pytest.importorskip("quack")
    from phalanx.kernels.library_objects import loaded
    from phalanx.kernels.rms_norm import quack_library

    kinds = [quack_library.Rows(2880, step, adds=True) for step in ("forward", "backward")]
    kinds += [
        quack_library.Rows(2048, step, True, fp32_weight=True) for step in ("forward", "backward")
    ]
    objects = [quack_library.build(rows, tmp_path) for rows in kinds]
    for rows, data in zip(kinds, objects, strict=True):
        assert b"sm_90a" in data
        assert callable(loaded(data))
        assert Cache(tmp_path).has(rows.entry)
    names = {rows.entry for rows in quack_library.SHIPPED}
    assert len(names) == len(quack_library.SHIPPED) and {r.entry for r in kinds} <= names

    def fail(rows: object) -> None:
        raise AssertionError("compiled again")

    before, quack_library._compile = quack_library._compile, fail
    try:
        assert [quack_library.build(rows, tmp_path) for rows in kinds] == objects
    finally:
        quack_library._compile = before


def interpreted() -> None:
    from phalanx.kernels.elementwise.sums_triton import add_rows

    for P, N, add in ((1, 8, False), (300, 40, True), (513, 16, False)):
        g = torch.Generator().manual_seed(P)
        partial = torch.randint(-50, 50, (P, N), generator=g).float()
        out = torch.randint(-50, 50, (N,), generator=g).float()
        want = partial.sum(0) + out if add else partial.sum(0)
        assert add_rows(partial, out, add=add) is out
        assert torch.equal(out, want)


def test_the_sum_of_a_weights_gradients_by_an_interpreter() -> None:
    pytest.importorskip("triton")
    interpret(__name__)
