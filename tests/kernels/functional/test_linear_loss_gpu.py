"""`linear_cross_entropy` on a GPU, by the kernels of its logits, against fp64."""

import pytest
import torch
from torch.nn.functional import cross_entropy, linear

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from phalanx.kernels.api import linear_cross_entropy

pytestmark = pytest.mark.gpu
N, D = 700, 256


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [1000, 1003, 151936])  # one pass, two passes, clusters
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunk", [None, 256])
def test_as_exact_as_torch(
    dtype: torch.dtype, vocabulary: int, reduction: str, chunk: int | None
) -> None:
    torch.manual_seed(0)
    x = torch.randn(N, D, device="cuda").to(dtype).requires_grad_()
    weight = (0.1 * torch.randn(vocabulary, D, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (N,), device="cuda")
    labels[::5] = -100
    up = torch.rand(N, device="cuda") if reduction == "none" else torch.tensor(1.5, device="cuda")

    def results(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        return [loss, *torch.autograd.grad((loss * up).sum(), leaves)]

    leaves = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = results(cross_entropy(linear(*leaves), labels, reduction=reduction), leaves)
    logits = linear(x, weight).float()
    theirs = results(cross_entropy(logits, labels, reduction=reduction), [x, weight])
    ours = results(
        linear_cross_entropy(x, weight, labels, reduction=reduction, chunk=chunk), [x, weight]
    )
    for got, base, want in zip(ours, theirs, exact, strict=True):
        bound = 1.2 * (base.double() - want).norm() + 1e-6 * want.norm()
        assert (got.double() - want).norm() <= bound


def test_less_memory_than_the_logits_and_a_graph() -> None:
    x = torch.randn(4096, D, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(32000, D, device="cuda").bfloat16().requires_grad_()
    labels = torch.randint(0, 32000, (4096,), device="cuda")

    def step() -> list[torch.Tensor]:
        loss = linear_cross_entropy(x, weight, labels, chunk=512)
        return [loss, *torch.autograd.grad(loss, (x, weight))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        want = step()
        assert torch.cuda.max_memory_allocated() - before < 4096 * 32000 * 2
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
