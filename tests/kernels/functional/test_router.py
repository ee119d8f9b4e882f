"""The router's choice and weights as a function, against routers of transformers.

That the kernel computes the same is shown on GPUs (test_router_gpu.py).
"""

import importlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from phalanx.kernels.api import KernelUnavailable, grouped_experts, router_topk
from tests.kernels.routing.topk_stand_ins import topk, topk_backward

T, E, K = 37, 16, 4
DEEPSEEK: dict[str, Any] = dict(score="sigmoid", normalize=True, scale=2.5, groups=4, group_topk=2)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


LIBRARIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": ("qwen3_moe", "Qwen3MoeTopKRouter", dict(norm_topk_prob=True), dict(normalize=True)),
    "gpt-oss": ("gpt_oss", "GptOssTopKRouter", {}, dict(softmax_over="topk")),
    "deepseek": (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        dict(n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5),
        DEEPSEEK,
    ),
}
"""Model and router of transformers, its options, and ours."""


@pytest.mark.parametrize("case", LIBRARIES.values(), ids=LIBRARIES)
def test_routes_as_transformers_does(
    case: tuple[str, str, dict[str, Any], dict[str, Any]],
) -> None:
    transformers = pytest.importorskip("transformers")
    model, name, theirs, ours = case
    config = transformers.AutoConfig.for_model(model, **theirs)
    for size in ("num_experts", "num_local_experts", "hidden_size"):
        setattr(config, size, E)
    config.num_experts_per_tok = K
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    router = getattr(module, name)(config)
    router.load_state_dict({"weight": torch.eye(E)}, strict=False)  # logits are its inputs
    bias = None
    if model == "deepseek_v3":
        bias = drawn(E, seed=2) / 4
        router.e_score_correction_bias.copy_(bias)
    elif model == "gpt_oss":
        torch.nn.init.zeros_(router.bias)

    logits, up = drawn(T, E), drawn(T, E, seed=1)
    results = []
    for function in (lambda x: router_topk(x, K, bias, **ours), lambda x: router(x)[:0:-1]):
        leaf = logits.clone().requires_grad_()
        idx, prob = function(leaf)
        weights = torch.zeros(T, E).scatter(1, idx.long(), prob.float())  # whatever their order
        results.append([weights, *torch.autograd.grad((weights * up).sum(), leaf)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_order_ties_and_shapes() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    idx, prob = router_topk(logits, 3)
    assert idx.tolist() == [[1, 3, 2], [0, 1, 2]] and idx.dtype == torch.int32
    torch.testing.assert_close(prob, logits.softmax(-1).gather(1, idx.long()))
    idx, prob = router_topk(drawn(2, 3, E, dtype=torch.bfloat16), 1, normalize=True)
    assert idx.shape == prob.shape == (2, 3, 1) and prob.dtype == torch.float32
    assert (prob < 1).all()  # one expert is not normalised
    idx, prob = router_topk(drawn(0, E), K)
    assert idx.shape == prob.shape == (0, K)


def test_groups_and_bias_choose_and_do_not_weigh() -> None:
    logits = drawn(T, E).requires_grad_()
    bias = torch.full((E,), -10.0)
    bias[8:] = 0.0
    idx, prob = router_topk(logits, K, bias, score="sigmoid", groups=4, group_topk=1)
    assert (idx >= 8).all() and (idx // 4 == idx[:, :1] // 4).all()
    torch.testing.assert_close(prob, logits.sigmoid().gather(1, idx.long()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype: torch.dtype) -> None:
    logits = drawn(T, E, dtype=dtype).requires_grad_()
    idx, prob = router_topk(logits, K, **{**DEEPSEEK, "groups": 1, "group_topk": 1})
    up = drawn(T, K, seed=1)
    (got,) = torch.autograd.grad(prob, logits, up)
    exact = logits.detach().double().requires_grad_()
    score = exact.sigmoid().gather(1, idx.long())
    want = torch.autograd.grad(2.5 * score / score.sum(-1, keepdim=True), exact, up.double())[0]
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.double(), want, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6
    )


@pytest.mark.parametrize("options", [{}, DEEPSEEK], ids=["softmax", "deepseek"])
def test_the_kernels_are_custom_ops(options: dict[str, Any]) -> None:
    """With kernels that compute in PyTorch."""
    pytest.importorskip("cutlass")
    from phalanx.kernels.functional import router
    from phalanx.kernels.sm90.routing import topk as kernel

    def route(x: Tensor) -> tuple[Tensor, Tensor]:
        return router_topk(x, K, **options)

    logits, up = drawn(T, E), drawn(T, K, seed=1)
    results = [routed(route, logits, up)]
    stand_ins = mock.patch.multiple(kernel, topk=topk, topk_backward=topk_backward)
    with stand_ins, mock.patch.object(router, "_is_fused", return_value=True):
        results.append(routed(route, logits, up))
        results.append(routed(torch.compile(route, fullgraph=True, backend="eager"), logits, up))
    for got in results[1:]:
        for value, want in zip(got, results[0], strict=True):
            torch.testing.assert_close(value, want)


def routed(route: Any, logits: Tensor, up: Tensor) -> list[Tensor]:
    """Experts, weights and gradient of the logits."""
    leaf = logits.clone().requires_grad_()
    idx, prob = route(leaf)
    return [idx, prob, *torch.autograd.grad(prob, leaf, up)]


def test_compiles_as_one_graph_with_the_experts() -> None:
    w1, w2 = drawn(E, 2 * 8, 8, seed=3), drawn(E, 8, 8, seed=4)

    def layer(x: Tensor, gate: Tensor) -> Tensor:
        idx, prob = router_topk(x @ gate, K, **DEEPSEEK)
        return grouped_experts(x, idx, prob, w1, w2)

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        x, gate = drawn(T, 8).requires_grad_(), drawn(8, E, seed=5).requires_grad_()
        out = function(x, gate)
        results.append([out, *torch.autograd.grad(out.square().sum(), (x, gate))])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(top_k=17), ValueError, "top_k=17 must be from 1 to 16"),
        (dict(score="tanh"), ValueError, "score=tanh is unknown: use softmax, sigmoid"),
        (dict(softmax_over="k"), ValueError, "softmax_over=k is unknown: use all, topk"),
        (dict(groups=3), ValueError, "4 of 16 experts cannot come from 3 of 3 equal groups"),
        (dict(groups=8, group_topk=1), ValueError, "cannot come from 1 of 8"),
        (dict(bias=torch.zeros(E)), ValueError, "bias is for score=sigmoid"),
        (dict(bias=torch.zeros(3), score="sigmoid"), ValueError, r"bias must be \[16\]"),
        (
            dict(bias=torch.zeros(E, device="meta"), score="sigmoid"),
            ValueError,
            "^bias is on meta, the input on cpu: move one of them",
        ),
        (dict(backend="cudnn"), ValueError, "backend=cudnn is unknown: use auto, fused, torch"),
        (dict(backend="fused"), KernelUnavailable, "backend=fused cannot run: needs CUDA; use"),
        (dict(scores="softmax"), TypeError, "scores is no option of router_topk: use score, "),
    ],
)
def test_mistakes_are_one_line(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        router_topk(drawn(T, E), options.pop("top_k", K), **options)
    assert "\n" not in str(raised.value)


def test_logits_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="logits must be fp32, bf16, fp16 or fp64, not torch.i"):
        router_topk(drawn(T, E, dtype=torch.int64), K)
