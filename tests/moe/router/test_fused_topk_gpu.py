"""The router's kernels under autograd on a Hopper GPU, against their definition in fp64."""

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.configs.schema import RouterConfig
from phalanx.kernels.routing.topk_scores import choose, probabilities
from phalanx.moe.router.fused_topk import best, topk, unsupported
from tests.kernels.capture import check_replay

pytestmark = pytest.mark.gpu

SHAPES = {  # T, E, K, router
    "moonlight": (8192, 64, 6, dict(score="sigmoid", bias_rate=1e-3, scale=2.446)),
    "deepseek-v3": (
        4096,
        256,
        8,
        dict(score="sigmoid", groups=8, group_topk=4, bias_rate=1e-3, scale=2.5),
    ),
    "groups without a bias": (1001, 160, 6, dict(score="sigmoid", groups=8, group_topk=3)),
    "kimi-k2": (4096, 384, 8, dict(score="sigmoid", bias_rate=1e-3, scale=2.827)),
    "qwen3": (4096, 128, 8, dict(score="softmax")),
    "gpt-oss": (1001, 32, 4, dict(score="softmax", softmax_over="topk")),
    "not normalised": (333, 256, 8, dict(score="sigmoid", normalize=False)),
    "over all": (333, 512, 16, dict(score="softmax", normalize=False, scale=1.5)),
}


def drawn(T, E, seed=0):
    g = torch.Generator("cuda").manual_seed(seed)
    return 2 * torch.randn(T, E, generator=g, device="cuda")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_equals_the_composition(shape):
    T, E, K, router = shape
    options = RouterConfig(**router)
    assert unsupported(options, experts=E, top_k=K) is None
    logits, up = drawn(T, E).requires_grad_(), drawn(K, T, seed=1).t()
    bias = drawn(1, E, seed=2)[0] / 8 if options.bias_rate else None
    idx, prob = topk(logits, bias, options, K)
    score = logits.detach()
    if bias is not None or options.groups > 1:
        score = score.sigmoid()
    score = score if bias is None else score + bias
    want = choose(score, K, options.groups, options.group_topk)
    # Two sums that differ in the last bit may change places.
    assert (idx.long() != want).any(1).sum() <= (0 if bias is None else T / 1000)
    torch.testing.assert_close(score.gather(1, idx.long()), score.gather(1, want))
    exact = logits.detach().double().requires_grad_()
    stated = probabilities(exact, idx.long(), options)
    torch.testing.assert_close(prob.double(), stated, rtol=1e-5, atol=1e-7)
    (got,) = torch.autograd.grad(prob, logits, up)
    (grad,) = torch.autograd.grad(stated, exact, up.double())
    torch.testing.assert_close(got.double(), grad, rtol=1e-4, atol=3e-6)
    assert torch.equal(best(logits, K).long(), choose(logits.detach(), K))


@pytest.mark.parametrize(("groups", "group_topk"), [(1, 1), (4, 2)])
def test_graph_capture(groups, group_topk):
    logits, up = drawn(1000, 64).requires_grad_(), drawn(1000, 6, seed=1)[:, :4].contiguous()
    options = RouterConfig(score="sigmoid", bias_rate=1e-3, groups=groups, group_topk=group_topk)
    bias = drawn(1, 64, seed=2)[0]

    def step():
        idx, prob = topk(logits, bias, options, 4)
        return [idx, prob, best(logits, 4), *torch.autograd.grad(prob, logits, up)]

    check_replay(step, logits, drawn(1000, 64, seed=5))
