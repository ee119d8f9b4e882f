"""`router_topk` by its kernel on a Hopper GPU, against PyTorch's operations in fp64."""

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.kernels.api import router_topk
from tests.kernels.capture import check_replay

pytestmark = pytest.mark.gpu

T = 1001
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {  # E, K, options
    "qwen3": (128, 8, dict(normalize=True)),
    "gpt-oss": (32, 4, dict(softmax_over="topk")),
    "deepseek": (
        256,
        8,
        dict(score="sigmoid", normalize=True, scale=2.5, groups=8, group_topk=4),
    ),
    "over all": (512, 16, dict(scale=1.5)),
}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return 2 * torch.randn(shape, generator=generator, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_equals_torch(name: str, dtype: torch.dtype) -> None:
    E, K, options = SHAPES[name]
    logits, up = drawn(T, E).to(dtype), drawn(T, K, seed=1)
    bias = drawn(E, seed=2) / 8 if name == "deepseek" else None
    results = []
    for backend in ("fused", "torch"):
        leaf = logits.clone().requires_grad_()
        idx, prob = router_topk(leaf, K, bias, backend=backend, **options)
        results.append((idx, prob, *torch.autograd.grad(prob, leaf, up)))
    (idx, prob, grad), (want_idx, want_prob, want_grad) = results
    same = (idx == want_idx).all(1)
    # Two sums that differ in the last bit may change places.
    assert (~same).sum() <= (T // 100 if bias is not None else 0)
    torch.testing.assert_close(prob[same], want_prob[same], rtol=1e-5, atol=1e-7)
    close = dict(rtol=2e-2, atol=1e-3) if dtype is torch.bfloat16 else dict(rtol=1e-4, atol=3e-6)
    torch.testing.assert_close(grad[same], want_grad[same], **close)


def test_graph_and_compile() -> None:
    E, K, options = SHAPES["deepseek"]
    logits, up = drawn(T, E).requires_grad_(), drawn(T, K, seed=1)
    bias = drawn(E, seed=2)

    def step(route: Any = router_topk) -> tuple[torch.Tensor, ...]:
        idx, prob = route(logits, K, bias, **options)
        return idx, prob, *torch.autograd.grad(prob, logits, up)

    for got, want in zip(step(torch.compile(router_topk, fullgraph=True)), step(), strict=True):
        assert torch.equal(got, want)
    check_replay(step, logits, drawn(T, E, seed=3))
