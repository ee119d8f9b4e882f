"""The choice of `auto` on an NVIDIA GPU, its warnings, and captures in CUDA graphs."""

import warnings

import pytest
import torch

from phalanx.kernels.api import GroupedMLP, grouped_experts, resolve_backend
from phalanx.kernels.functional import choice
from tests.kernels.capture import check_replay

pytestmark = pytest.mark.gpu
E, D, F, K, T = 8, 256, 192, 2, 100


@pytest.fixture(autouse=True)
def _nothing_chosen() -> None:
    for cache in (choice._chosen, choice.specification, choice._warn_once):
        cache.cache_clear()


def run(module: GroupedMLP) -> torch.Tensor:
    prob, idx = torch.rand(T, E, device="cuda").topk(K)
    out: torch.Tensor = module(torch.randn(T, D, device="cuda", dtype=module.w1.dtype), idx, prob)
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_loop_that_reads_counts_is_told_once(dtype: torch.dtype) -> None:
    module = GroupedMLP(E, D, F, K, device="cuda", dtype=dtype)
    assert module.resolved_backend == "reference"
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            assert run(module).dtype == dtype
    (line,) = [str(w.message) for w in told if "backend=auto" in str(w.message)]
    assert line.startswith("backend=auto takes reference on this GPU, which reads the rows of each")
    why = "needs bf16 or fp32, not fp16" if dtype == torch.float16 else "needs bf16 on CUDA"
    assert f"not torch: {why}" in line and "set backend=reference if it" in line


def test_odd_sizes_say_why_the_fused_kernels_do_not_run() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    module = GroupedMLP(E, D, 72, K, device="cuda", dtype=torch.bfloat16)
    assert module.resolved_backend == "torch"
    with pytest.warns(UserWarning, match=r"^backend=auto takes torch on .*ffn=72 must be multiple"):
        run(module)


@pytest.mark.parametrize("ffn", [F, 72])
def test_what_reads_no_counts_is_captured(ffn: int) -> None:
    where = dict(device="cuda", dtype=torch.bfloat16)
    x, w1, w2 = (torch.randn(s, **where) / 16 for s in ((T, D), (E, 2 * ffn, D), (E, D, ffn)))
    if (found := resolve_backend(x, w1, w2, K)).reads_counts:
        pytest.skip(found.reason)
    prob, idx = torch.rand(T, E, device="cuda").topk(K)
    leaves = [t.requires_grad_() for t in (x, w1, w2)]

    def step() -> list[torch.Tensor]:
        out = grouped_experts(x, idx, prob, w1, w2)
        return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]

    check_replay(step, idx, idx.flip(0))


def test_derivatives_in_forward_mode_are_an_error() -> None:
    where = dict(device="cuda", dtype=torch.bfloat16)
    x, w1, w2 = (torch.randn(s, **where) / 16 for s in ((T, D), (E, 2 * F, D), (E, D, F)))
    prob, idx = torch.rand(T, E, device="cuda").topk(K)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return grouped_experts(x, idx, prob, w1, w2).float().square().sum()

    with pytest.raises(RuntimeError, match="the expert MLP has no derivatives in forward mode"):
        torch.func.jvp(loss, (x,), (x,))
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    assert torch.equal(torch.func.grad(loss)(x), want)
