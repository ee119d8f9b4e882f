"""The whole router on a Hopper GPU: kernels against the composition on a CPU, forced or not."""

from typing import Any

import pytest
import torch

pytest.importorskip("cutlass")
if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from phalanx.configs.schema import RouterConfig
from phalanx.kernels.routing.topk_scores import probabilities
from phalanx.moe.router import fused_topk
from phalanx.moe.router.forced import ForcedBalance

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("T", "E", "K", "options"),
    [
        (8192, 128, 8, {}),
        (4097, 256, 8, {"score": "sigmoid", "groups": 8, "group_topk": 4, "scale": 2.5}),
        (333, 32, 4, {"softmax_over": "topk"}),
        (100, 64, 6, {"normalize": False, "scale": 1.5}),
        (100, 64, 6, {"score": "sigmoid", "normalize": False}),
    ],
)
def test_forced_choice_and_gradient(T: int, E: int, K: int, options: dict[str, Any]) -> None:
    o = RouterConfig(force_balance=True, **options)
    assert fused_topk.unsupported(o, experts=E, top_k=K) is None
    module = ForcedBalance(o, experts=E, top_k=K)
    torch.manual_seed(0)
    logits = torch.randn(T, E, device="cuda", requires_grad=True)
    idx, prob = fused_topk.forced(logits, module.table, T, o)
    want = module(T, T)
    assert torch.equal(idx.long(), want)
    exact = logits.detach().double().requires_grad_()
    stated = probabilities(exact, want, o)
    torch.testing.assert_close(prob.double(), stated, rtol=1e-5, atol=1e-7)
    up = torch.randn_like(prob)
    (got,) = torch.autograd.grad(prob, logits, up)
    (grad,) = torch.autograd.grad(stated, exact, up.double())
    torch.testing.assert_close(got.double(), grad, rtol=1e-4, atol=3e-6)
