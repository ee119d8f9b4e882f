"""The router on the fused kernels: which options they take, and all around them on a CPU."""

from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.configs.load import load
from phalanx.configs.load import options as group_options
from phalanx.configs.schema import RouterConfig
from phalanx.moe.router import fused_topk
from phalanx.moe.router.fused_topk import unsupported
from phalanx.moe.router.token_rounding import slots
from tests.kernels.routing.topk_stand_ins import topk, topk_backward
from tests.moe.cases import EXPERTS, LOSSES, TOP_K, build_router, draw, hidden, install
from tests.support.distributed import run_distributed


@pytest.mark.parametrize(
    ("options", "experts", "top_k", "why"),
    [
        ({}, 8, 8, None),
        ({"score": "sigmoid", "bias_rate": 1e-3, "scale": 2.5}, 512, 16, None),
        ({"groups": 4, "group_topk": 4}, 64, 6, None),
        ({"score": "sigmoid", "groups": 8, "group_topk": 4}, 256, 8, None),  # DeepSeek-V3
        ({"score": "sigmoid", "groups": 32, "group_topk": 1}, 128, 2, None),
        ({"groups": 4, "group_topk": 2}, 64, 6, "score=sigmoid, not softmax"),
        ({"score": "sigmoid", "groups": 64, "group_topk": 4}, 512, 8, "at most 32 groups, not 64"),
        ({"score": "sigmoid", "groups": 4, "group_topk": 2}, 24, 4, "multiple of 4 experts, not 6"),
        ({"score": "sigmoid", "groups": 4, "group_topk": 2}, 64, 6, "2 scores, not by 3"),
        ({"score": "sigmoid", "groups": 4, "group_topk": 2, "scale": 0.0}, 64, 4, "scale"),
        ({"rounding": "up"}, 64, 6, "token rounding (rounding=up) is not supported"),
        ({"force_balance": True, "groups": 4, "group_topk": 2}, 64, 6, None),
        ({"scale": 0.0}, 64, 6, "scale"),
        ({}, 60, 6, "60"),
        ({}, 520, 6, "520"),
        ({}, 64, 17, "17"),
    ],
)
def test_what_the_kernel_takes(
    options: dict[str, Any], experts: int, top_k: int, why: str | None
) -> None:
    refused = unsupported(RouterConfig(**options), experts=experts, top_k=top_k)
    assert refused is None if why is None else why in str(refused)


def _equal(options: dict[str, Any], fused: bool) -> None:
    from phalanx.kernels.sm90.routing import topk as kernel

    install()
    results = []
    calls = mock.Mock(wraps=topk)
    with mock.patch.multiple(kernel, topk=calls, topk_backward=topk_backward):
        for backend in ("torch", "fused"):
            r = build_router({**LOSSES, **options}, backend=backend)
            if r.expert_bias is not None:
                r.expert_bias.copy_(draw(EXPERTS, seed=9, scale=0.3))
            x = hidden().requires_grad_()
            idx, prob = r(x)
            prob.backward(draw(TOP_K, prob.size(0), seed=3).t())
            r.eval()
            results.append([idx, prob, x.grad, r.weight.grad, *r.buffers(), *r(x)])
            assert r.fused == (fused and backend == "fused") == calls.called
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({"scale": 2.5}, True),
        ({"normalize": False}, True),
        ({"softmax_over": "topk"}, True),
        ({"score": "sigmoid"}, True),
        ({"score": "sigmoid", "bias_rate": 1e-3, "scale": 2.5}, True),
        ({"score": "sigmoid", "bias_rate": 1e-3, "groups": 2, "group_topk": 1}, True),
        ({"score": "sigmoid", "groups": 2, "group_topk": 1}, True),
        ({"score": "sigmoid", "bias_rate": 1e-3, "groups": 4, "group_topk": 2}, False),
    ],
)
def test_equals_the_composition(options: dict[str, Any], fused: bool) -> None:
    pytest.importorskip("cutlass")
    run_distributed(_equal, 1, options, fused)


@pytest.mark.parametrize("model", [m for m in group_options("model") if not m.startswith("tiny")])
def test_what_a_model_launches_is_shipped(model: str) -> None:
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.jit.shipped import SHIPPED
    from phalanx.kernels.sm90.routing import topk as kernel

    moe = load([f"model={model}"]).model.moe
    assert unsupported(moe.router, experts=moe.experts, top_k=moe.top_k) is None
    logits_TE = torch.empty(4, moe.experts, device="meta", requires_grad=True)
    biased = bool(moe.router.bias_rate)
    bias_E = torch.empty(moe.experts, device="meta") if biased else None
    launch = mock.Mock()
    with mock.patch.multiple(kernel, launch=launch, check=mock.Mock()):
        _, prob_TK = fused_topk.topk(logits_TE, bias_E, moe.router, moe.top_k)
        prob_TK.sum().backward()
        fused_topk.best(logits_TE, moe.top_k)
    assert logits_TE.grad is not None
    launched = [call.args[:2] for call in launch.call_args_list]
    assert len(launched) == 3 and set(launched) <= set(SHIPPED)


@pytest.mark.parametrize("model", [m for m in group_options("model") if not m.startswith("tiny")])
def test_attention_of_a_model_is_shipped(model: str) -> None:
    pytest.importorskip("flash_attn.cute")
    from phalanx.kernels.core_attention.fa4 import SHIPPED, AttentionLayer

    a = load([f"model={model}"]).model.attention
    if a.sparse:
        pytest.skip("sparse attention is plain torch")
    group, d, v = a.heads // a.kv_heads, a.head_dim, a.head_dim
    if a.kind == "mla":
        group, d, v = 1, a.qk_nope_dim + a.qk_rope_dim, a.v_dim
    windows = {bool(a.window), a.window > 0 and a.window_every == 1}
    launched = {
        AttentionLayer(group, d, v, window=window, sinks=a.sinks, deterministic=deterministic)
        for window in windows
        for deterministic in (False, True)
    }
    assert launched <= set(SHIPPED)


@pytest.mark.parametrize("model", [m for m in group_options("model") if not m.startswith("tiny")])
def test_exchanges_of_a_model_are_shipped(model: str) -> None:
    """Between eight GPUs, there and back, beside the experts and not."""
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.exchange.combine_push import CombinePushConfig
    from phalanx.kernels.sm90.exchange.push import PushConfig
    from phalanx.kernels.sm90.experts.combine import CombineConfig
    from phalanx.kernels.sm90.jit.shipped import SHIPPED

    m = load([f"model={model}"]).model
    width = slots(m.moe.router, experts=m.moe.experts, top_k=m.moe.top_k).width
    launched: set[object] = {CombineConfig(width)}
    for other in (False, True):
        launched |= {PushConfig(2 * m.hidden, 8, width, other)}
        launched |= {CombinePushConfig(width, 8, side=other)}
    assert launched <= {config for _, config in SHIPPED}
