"""flash-attn-4 against fp64 on a Hopper GPU, beside the errors of other backends.

The reference, which test_core.py pins, is the oracle; tensors have the strides that the attention
modules give them.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from phalanx.kernels import cache
from phalanx.kernels.core_attention import core, fa4, fa4_library
from phalanx.kernels.core_attention.core import attention
from tests.kernels.capture import check_replay
from tests.kernels.core_attention import test_core

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():  # before an import of seconds
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("flash_attn.cute")


class Case(NamedTuple):
    S: int
    T: int
    H: int
    G: int
    d: int
    v: int
    window: int = 0
    sinks: torch.dtype | None = None
    B: int = 2


BF16, FP32 = torch.bfloat16, torch.float32
CASES = {
    "qwen3": Case(1024, 1024, 16, 2, 128, 128),
    "gpt_oss": Case(1024, 1024, 16, 2, 64, 64, sinks=BF16),
    "gpt_oss_window": Case(1024, 1024, 16, 2, 64, 64, window=128, sinks=BF16),
    "sinks_fp32": Case(640, 640, 8, 2, 64, 64, window=100, sinks=FP32),
    "mla": Case(1024, 1024, 8, 8, 192, 128),
    "mla_window": Case(512, 512, 4, 4, 192, 128, window=200, B=1),
    "mla_narrow": Case(512, 512, 4, 4, 96, 64),
    "one_head": Case(256, 256, 1, 1, 64, 64),
    "one_group": Case(256, 256, 8, 1, 128, 128),
    "d256": Case(300, 300, 4, 2, 256, 256),
    "d96": Case(300, 300, 4, 2, 96, 96),
    "d32": Case(300, 300, 8, 2, 32, 32, window=32, sinks=BF16),
    "odd": Case(333, 333, 8, 2, 64, 64, sinks=BF16),
    "odd_mla": Case(1001, 1001, 4, 4, 192, 128, B=1),
    "short": Case(3, 3, 4, 2, 64, 64, sinks=BF16),
    "one_token": Case(1, 1, 4, 2, 64, 64, sinks=BF16),
    "one_token_mla": Case(1, 1, 4, 4, 192, 128, B=1),
    "window_one": Case(200, 200, 4, 2, 64, 64, window=1),
    "last_queries": Case(256, 1024, 8, 2, 128, 128),
    "last_queries_odd": Case(129, 777, 8, 2, 64, 64, window=100, sinks=BF16),
    "last_queries_mla": Case(192, 500, 4, 4, 192, 128),
    "last_query": Case(1, 300, 4, 2, 64, 64, window=64, sinks=BF16),
}


def drawn(case: Case, seed: int = 0) -> list[Tensor]:
    """Leaves q_SBHd, k_TBGd, v_TBGv (and sinks): values between other channels where they are in
    latent attention, or cut from a mixed projection of keys and values."""
    g = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device="cuda").bfloat16()

    q = random(case.S, case.B, case.H, case.d)
    k = random(case.T, case.B, case.G, case.d)
    v = random(case.T, case.B, case.G, case.v + 32)[..., 32:]
    tensors = [q, k, v]
    if case.sinks is not None:
        tensors.append((2 * torch.randn(case.H, generator=g, device="cuda")).to(case.sinks))
    return [t.detach().requires_grad_() for t in tensors]


def out_of(case: Case, tensors: list[Tensor], backend: str) -> Tensor:
    """o_SBHv; `plain` is what a user would write in bf16."""
    q, k, v, *sinks = tensors
    heads = [x.permute(1, 2, 0, 3) for x in (q, k, v)]
    if backend == "plain":
        same = test_core.Case(case.H, case.G, case.S, case.T, case.d, case.v, case.window)
        return test_core.plain_bf16(same, [*heads, *sinks], case.d**-0.5).permute(2, 0, 1, 3)
    o_BHSv = attention(
        *heads,
        scale=case.d**-0.5,
        window=case.window,
        sinks_H=sinks[0] if sinks else None,
        backend=backend,
    )
    return o_BHSv.permute(2, 0, 1, 3)


def upstream(case: Case) -> Tensor:
    """Gradient of the output, contiguous as a projection hands it back."""
    g = torch.Generator("cuda").manual_seed(9)
    return torch.randn(case.S, case.B, case.H, case.v, generator=g, device="cuda").bfloat16()


def passes(
    case: Case, tensors: list[Tensor], backend: str, dout: Tensor | None = None
) -> list[Tensor]:
    """Output and gradients."""
    dout = upstream(case) if dout is None else dout
    out = out_of(case, tensors, backend)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout.to(out.dtype))]


def by_rounding(case: Case, given: list[Tensor], exact: list[Tensor]) -> list[float]:
    """Errors of gradients that come of the output's rounding to bf16 alone.

    The backward pass takes rowsum(dO * O) off every row, from the output that it is given. With
    few keys and a sink that is nearly all of the gradient.
    """
    q, k, _, *sinks = (t.detach().double() for t in given)
    out, dout = exact[0], upstream(case).double()
    off_SBH1 = (dout * (out.bfloat16() - out)).sum(-1, keepdim=True)
    k_leaf = k.clone().requires_grad_()
    seen = out_of(case._replace(v=case.d), [q, k, k_leaf, *sinks], "reference")
    (dk,) = torch.autograd.grad(seen, k_leaf, off_SBH1 * q)
    scale = case.d**-0.5
    parts = [0 * out, scale * off_SBH1 * seen.detach(), scale * dk]
    wrong = [a + b for a, b in zip(parts, exact, strict=False)]
    return [*errors([*wrong, *exact[3:]], exact)]


def errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    """Relative to each tensor, or to a hundredth of the output where a gradient vanishes."""
    least = 0.01 * want[0].norm()
    return [
        float((a.double() - b).norm() / torch.maximum(b.norm(), least))
        for a, b in zip(got, want, strict=True)
    ]


NAMES = ("o", "dq", "dk", "dv", "dsinks")


def exactly(case: Case, given: list[Tensor]) -> list[Tensor]:
    return passes(case, [t.detach().double().requires_grad_() for t in given], "reference")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_error_beside_others(name: str, deterministic: bool) -> None:
    case = CASES[name]
    given = drawn(case)
    exact = exactly(case, given)
    torch.use_deterministic_algorithms(deterministic)
    try:
        ours = errors(passes(case, given, "fa4"), exact)
    finally:
        torch.use_deterministic_algorithms(False)
    peers = ["plain", "flex"] if case.d in (64, 128, 192) else ["plain"]
    others = {peer: errors(passes(case, given, peer), exact) for peer in peers}
    rounded = by_rounding(case, given, exact)
    for n, (what, error) in enumerate(zip(NAMES, ours, strict=False)):
        beside = {peer: other[n] for peer, other in others.items()}
        print(f"{name:18} {what:6} fa4 {error:.2e}", *(f"{p} {e:.2e}" for p, e in beside.items()))
        rounding = max(2**-8 if what == "dsinks" else 2**-9, 1.5 * rounded[n])
        assert all(error <= max(2 * other, rounding) for other in beside.values()), (what, error)


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_window", "sinks_fp32"])
def test_gradient_of_sinks(name: str) -> None:
    # Of all that is summed, the rounding of the output to bf16 is the greatest error.
    case = CASES[name]
    given = drawn(case, seed=5)
    exact = exactly(case, given)[-1]
    got = passes(case, given, "fa4")[-1]
    assert got.dtype == case.sinks and got.shape == (case.H,)
    error = float((got.double() - exact).norm() / exact.norm())
    print(f"{name}: gradient of sinks {error:.2e}")
    assert error < 2**-8


@pytest.mark.parametrize("name", CASES)
def test_deterministic_repeats_are_bitwise_equal(name: str) -> None:
    case = CASES[name]
    given = drawn(case)
    torch.use_deterministic_algorithms(True)
    try:
        first = passes(case, given, "fa4")
        for _ in range(5):
            for a, b in zip(first, passes(case, given, "fa4"), strict=True):
                assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss_window", "mla", "odd", "last_queries_odd"])
def test_captured_step_replays_the_bits(name: str) -> None:
    case = CASES[name]
    given, other = drawn(case), drawn(case, seed=1)
    torch.use_deterministic_algorithms(True)
    try:
        step = partial(passes, case, given, "fa4", upstream(case))
        check_replay(step, given[0], other[0].detach())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss_window", "mla"])
def test_nothing_is_copied(name: str) -> None:
    """One kernel forward; backward those of the library, and its fills."""
    case = CASES[name]
    given = drawn(case)
    dout = upstream(case).flatten(2)

    def step() -> None:
        out = out_of(case, given, "fa4").flatten(2)
        assert out.is_contiguous()
        torch.autograd.grad(out, given, dout)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    names = [e.name for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    print(name, *names, sep="\n  ")
    grouped = case.H != case.G
    library = [n for n in names if "cutlass" in n or "flash" in n.lower()]
    rest = [n for n in names if n not in library]
    assert len(library) == (6 if grouped else 4)
    assert len(rest) <= (2 if grouped else 0), rest
    assert all("fill" in n.lower() or "memset" in n.lower() for n in rest), rest


def test_gradients_of_layers_around_it_keep_their_layout() -> None:
    given = drawn(CASES["mla"])
    _, dq, dk, dv = passes(CASES["mla"], given, "fa4")
    assert all(x.is_contiguous() for x in (dq, dk, dv))


def test_rows_that_are_not_aligned_are_copied() -> None:
    case = CASES["gpt_oss"]
    q, k, v, sinks = (t.detach() for t in drawn(case))

    def shifted(x: Tensor) -> Tensor:
        wide = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)
        wide[..., 3:] = x
        return wide[..., 3:].requires_grad_()

    odd = [shifted(q), shifted(k), shifted(v), sinks.requires_grad_()]
    plain = [x.detach().clone().requires_grad_() for x in odd]
    torch.use_deterministic_algorithms(True)
    try:
        for a, b in zip(passes(case, odd, "fa4"), passes(case, plain, "fa4"), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_expanded_gradient_of_the_output() -> None:
    case = CASES["qwen3"]
    given = drawn(case)
    got = torch.autograd.grad(out_of(case, given, "fa4").float().sum(), given)
    wide = [t.detach().double().requires_grad_() for t in given]
    want = torch.autograd.grad(out_of(case, wide, "reference").sum(), wide)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= 2**-7 * b.norm()


def test_without_gradients() -> None:
    case = CASES["gpt_oss_window"]
    given = drawn(case)
    with torch.no_grad():
        out = out_of(case, given, "fa4")
    assert torch.equal(out, out_of(case, given, "fa4"))
    assert not out.requires_grad


def test_recomputed() -> None:
    case = CASES["mla"]
    given = drawn(case)
    torch.use_deterministic_algorithms(True)
    try:
        want = passes(case, given, "fa4")
        out = torch.utils.checkpoint.checkpoint(
            lambda *t: out_of(case, list(t), "fa4"), *given, use_reentrant=True
        )
        out.backward(upstream(case))
        for a, b in zip([t.grad for t in given], want[1:], strict=True):
            assert a is not None and torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("d", range(32, 257, 32))
def test_other_widths_of_heads(d: int) -> None:
    case = Case(300, 300, 4, 2, d, d)
    given = drawn(case)
    exact = exactly(case, given)
    for what, error in zip(NAMES, errors(passes(case, given, "fa4"), exact), strict=False):
        assert error < 2**-7, (what, error)


@pytest.mark.parametrize(
    ("d", "v"), [(96, 64), (128, 64), (160, 64), (160, 128), (192, 64), (192, 128)]
)
def test_narrower_values(d: int, v: int) -> None:
    case = Case(300, 300, 4, 4, d, v)
    given = drawn(case)
    exact = exactly(case, given)
    for what, error in zip(NAMES, errors(passes(case, given, "fa4"), exact), strict=False):
        assert error < 2**-7, (what, error)


def test_memory_is_linear() -> None:
    case = Case(8192, 8192, 16, 16, 192, 128, B=1)
    given = drawn(case)
    passes(case, given, "fa4")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    passes(case, given, "fa4")
    grown = torch.cuda.max_memory_allocated() - before
    assert grown < case.H * case.S * case.T * 2 / 4


def test_chunks_of_context_ranks_are_the_whole() -> None:
    """The calls of moe/model/attention.py on two ranks, each with two of four chunks."""
    case = Case(1024, 1024, 8, 2, 64, 64, window=128, sinks=BF16)
    given = drawn(case)
    whole = out_of(case, given, "fa4")
    q, k, v, sinks = given
    parts = []
    for n in range(4):
        begin, end = max(0, n * 256 - case.window + 1), (n + 1) * 256
        part = [q[n * 256 : end], k[begin:end], v[begin:end], sinks]
        parts.append(out_of(case, part, "fa4"))
    error = (torch.cat(parts).double() - whole.double()).norm() / whole.double().norm()
    assert error < 2**-8
    assert core.visible_ST(256, 383, 128, "cpu").sum(1).eq(128).all()


@pytest.mark.parametrize("layer", fa4.SHIPPED, ids=str)
def test_a_run_finds_what_was_built_without_a_gpu(layer, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
    for function, label in fa4_library._KERNELS.items():
        programs = fa4_library.Programs(label)
        monkeypatch.setattr(getattr(fa4_library.library(), function), "compile_cache", programs)
    fa4.build(layer, tmp_path)
    built = cache.statistics()
    for function, label in fa4_library._KERNELS.items():  # as a new process has them
        programs = fa4_library.Programs(label)
        monkeypatch.setattr(getattr(fa4_library.library(), function), "compile_cache", programs)
    window, sinks = 100 * layer.window, BF16 if layer.sinks else None
    case = Case(768, 768, 3 * layer.group, 3, layer.d, layer.v, window, sinks, B=1)
    given = drawn(case)
    torch.use_deterministic_algorithms(layer.deterministic)
    try:
        got = passes(case, given, "fa4")
    finally:
        torch.use_deterministic_algorithms(False)
    run = cache.statistics()
    assert run.compiled == built.compiled and run.loaded > built.loaded
    for what, error in zip(NAMES, errors(got, exactly(case, given)), strict=False):
        assert error < 2**-7, (what, error)
